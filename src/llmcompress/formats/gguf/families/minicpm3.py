"""MiniCPM3: latent attention, whose matrix of keys and values stays whole. llama.cpp has its multipliers built in."""

from collections.abc import Mapping

from llmcompress.formats.gguf.family import GATED, Family, Shape
from llmcompress.formats.gguf.hyper import Hyper, whole
from llmcompress.formats.gguf.keys import Key, f32, u32
from llmcompress.formats.gguf.rope import Rope, longrope_attention, longrope_factors, original_context

_LATENT = ("attn_q_a", "attn_q_a_norm", "attn_q_b", "attn_kv_a_mqa", "attn_kv_a_norm", "attn_kv_b")


def _sizes(hyper: Hyper) -> tuple[int, int, int]:
    """Values of a head: of queries and keys without and with positions, and of values."""
    plain, turned, values = (
        whole(hyper.config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    return plain, turned, values


def _shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    plain, turned, values = _sizes(hyper)
    ranked, latent = whole(hyper.config, "q_lora_rank"), whole(hyper.config, "kv_lora_rank")
    return {
        "attn_q_a": (ranked, hyper.hidden),
        "attn_q_a_norm": (ranked,),
        "attn_q_b": (hyper.heads * (plain + turned), ranked),
        "attn_kv_a_mqa": (latent + turned, hyper.hidden),
        "attn_kv_a_norm": (latent,),
        "attn_kv_b": (hyper.heads * (plain + values), latent),
        "attn_output": (hyper.hidden, hyper.heads * values),
    }


def _values(hyper: Hyper, rope: Rope) -> Mapping[str, tuple[float, ...]]:
    if rope.kind != "longrope":
        return {}
    turned = _sizes(hyper)[1]
    return {
        f"rope_factors_{which}.weight": longrope_factors(rope, turned, f"{which}_factor") for which in ("long", "short")
    }


def _keys(hyper: Hyper, rope: Rope) -> list[Key]:
    plain, turned, values = _sizes(hyper)
    found = [
        u32("minicpm3.attention.key_length", plain + turned),
        u32("minicpm3.attention.value_length", values),
        u32("minicpm3.rope.dimension_count", turned),
    ]
    if rope.kind == "longrope":
        found.append(u32("minicpm3.rope.scaling.original_context_length", original_context(rope)))
        found.append(f32("minicpm3.rope.scaling.attn_factor", longrope_attention(rope, hyper.context)))
    return found


FAMILY = Family(
    name="minicpm3",
    model_types=("minicpm3",),
    arch="minicpm3",
    tied=True,
    grouped=False,
    ropes=("default", "longrope"),
    layer=("attn_norm", *_LATENT, "attn_output", *GATED),
    biases=(),
    told=("q_lora_rank", "kv_lora_rank"),
    shapes=_shapes,
    values=_values,
    keys=_keys,
    only={"hidden_act": ("silu", None), "scale_emb": (12,), "scale_depth": (1.4,), "dim_model_base": (256,)},
)
