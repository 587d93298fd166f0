"""Phi-3 and Phi-4: q, k, v are one matrix, gate and up are one; long contexts have two sets of rotary factors."""

from collections.abc import Mapping

from llmcompress.formats.gguf.family import Family
from llmcompress.formats.gguf.hyper import Hyper, whole
from llmcompress.formats.gguf.keys import Key, f32, u32
from llmcompress.formats.gguf.rope import Rope, longrope_attention, longrope_factors, original_context


def values(hyper: Hyper, rope: Rope) -> Mapping[str, tuple[float, ...]]:
    if rope.kind != "longrope":
        return {}
    return {
        "rope_factors_long.weight": longrope_factors(rope, hyper.head_dim, "long_factor"),
        "rope_factors_short.weight": longrope_factors(rope, hyper.head_dim, "short_factor"),
    }


def keys(hyper: Hyper, rope: Rope) -> tuple[Key, ...]:
    window = 0 if hyper.config.get("sliding_window") is None else whole(hyper.config, "sliding_window")
    found = [
        u32("phi3.rope.dimension_count", rope.dimensions(hyper.head_dim)),
        u32("phi3.rope.scaling.original_context_length", original_context(rope)),
        u32("phi3.attention.sliding_window", window),
    ]
    if rope.kind == "longrope":
        found.append(f32("phi3.rope.scaling.attn_factor", longrope_attention(rope, hyper.context)))
    return tuple(found)


FAMILY = Family(
    name="phi3",
    model_types=("phi3",),
    arch="phi3",
    square=True,
    ropes=("default", "longrope"),
    fused_gate=True,
    layer=("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down"),
    biases=(),
    defaults={"rms_norm_eps": 1e-5},
    only={"hidden_act": ("silu", None)},
    values=values,
    keys=keys,
)
