"""Llama 4 (text) and Ministral 3: queries are scaled by position, Llama 4 rotates in most layers alone."""

from collections.abc import Mapping, Sequence

from llmcompress.formats.gguf.families import llama
from llmcompress.formats.gguf.families.layer_patterns import unrotated
from llmcompress.formats.gguf.family import ATTENTION, EXPERTS, GATED, SHARED_EXPERT, Family, Kin, Shape
from llmcompress.formats.gguf.hyper import Hyper, number, whole
from llmcompress.formats.gguf.keys import Key, f32, u32
from llmcompress.formats.gguf.rope import Rope
from llmcompress.formats.gguf.tensors import GGUFTensor, stretch

_SILU = {"hidden_act": ("silu", None)}
_CHUNK = 8192
_UNNORMED = 128  # experts of the model whose queries and keys llama.cpp does not norm


def _parts(path: str, shape: Shape, hyper: Hyper) -> Sequence[GGUFTensor] | None:
    leaf = path.rpartition(".")[2]
    if len(shape) != 3 or leaf not in ("gate_up_proj", "down_proj"):
        return None
    if leaf == "down_proj":
        return (GGUFTensor("ffn_down_exps.weight", (shape[0], shape[2], shape[1]), transposed=True),)
    half = shape[2] // 2
    if shape[2] % 2:
        return None
    return [
        GGUFTensor(f"ffn_{name}_exps.weight", (shape[0], half, shape[1]), transposed=True,
                   rows=stretch(first, half, shape[2]))
        for name, first in (("gate", 0), ("up", half))
    ]  # fmt: skip


def _layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    sparse = (layer + 1) % whole(hyper.config, "interleave_moe_layer_step") == 0
    return (*ATTENTION, *((*EXPERTS, *SHARED_EXPERT) if sparse else GATED))


def _shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    dense = whole(hyper.config, "intermediate_size_mlp")
    return {
        **dict.fromkeys(("ffn_gate", "ffn_up"), (dense, hyper.hidden)),
        "ffn_down": (hyper.hidden, dense),
        **dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp"), (hyper.inner, hyper.hidden)),
        "ffn_down_shexp": (hyper.hidden, hyper.inner),
    }


def _keys(hyper: Hyper, rope: Rope) -> list[Key]:
    return [
        u32("llama4.feed_forward_length", whole(hyper.config, "intermediate_size_mlp")),
        u32("llama4.expert_feed_forward_length", hyper.inner),
        u32("llama4.interleave_moe_layer_step", whole(hyper.config, "interleave_moe_layer_step")),
    ]


def _objection(hyper: Hyper) -> str | None:
    config, step = hyper.config, whole(hyper.config, "interleave_moe_layer_step")
    asked = {
        "attention_chunk_size": _CHUNK,
        "attn_temperature_tuning": True,
        "floor_scale": _CHUNK,
        "attn_scale": 0.1,
        "use_qk_norm": hyper.experts != _UNNORMED,
        "moe_layers": list(range(step - 1, hyper.layers, step)),
        "layer_types": ["full_attention" if (layer + 1) % 4 == 0 else "chunked_attention"
                        for layer in range(hyper.layers)],
    }  # fmt: skip
    for name, value in asked.items():
        if config.get(name) is not None and config[name] != value:
            return f"config.json: {name} is {config[name]!r}, llama.cpp computes llama4 models with {value!r}"
    return unrotated(4)(hyper)


def _ministral_keys(hyper: Hyper, rope: Rope) -> list[Key]:
    found = []
    if rope.scaling.get("llama_4_scaling_beta") is not None:
        beta = number(rope.scaling, "llama_4_scaling_beta")
        found.append(f32("mistral3.attention.temperature_scale", beta))
    if rope.kind == "yarn" and rope.scaling.get("mscale_all_dim") is not None:
        found.append(f32("mistral3.rope.scaling.yarn_log_multiplier", number(rope.scaling, "mscale_all_dim")))
    return found


FAMILY = Kin(
    "llama4",
    (
        Family(
            "llama4", ("llama4_text",), "llama4", experts=True, partly=True, ropes=("default", "llama3"),
            windowed=True, layer=_layer, shapes=_shapes, parts=_parts, keys=_keys, values=llama.values, biases=(),
            objection=_objection, only=_SILU,
        ),
        Family(
            "ministral3", ("ministral3",), "mistral3", ropes=("default", "yarn"), partly=True, rows=llama.rows,
            keys=_ministral_keys, biases=(), only={**_SILU, "sliding_window": (None,)},
        ),
    ),
)  # fmt: skip
