"""Kimi Linear: delta attention with a gate for every channel, and latent attention without positions in some layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from llmcompress.formats.gguf.families import deepseek, leading
from llmcompress.formats.gguf.family import CHOICE, EXPERTS, GATED, SHARED_EXPERT, Family, Shape
from llmcompress.formats.gguf.hyper import Hyper, whole
from llmcompress.formats.gguf.keys import Key, i32s, u32
from llmcompress.formats.gguf.rope import Rope
from llmcompress.formats.gguf.tensors import GGUFTensor

_ARCH = "kimi-linear"
_CONVOLUTIONS = ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")
_DELTA = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", *_CONVOLUTIONS, "ssm_f_a", "ssm_f_b", "ssm_beta",
    "ssm_a", "ssm_dt.bias", "ssm_g_a", "ssm_g_b", "ssm_norm",
)  # fmt: skip
_LATENT = ("attn_norm", "attn_q", "attn_kv_a_mqa", "attn_kv_a_norm", "attn_k_b", "attn_v_b", "attn_output")
_SPARSE = (*EXPERTS, CHOICE, *SHARED_EXPERT)
_DENSE = {f".block_sparse_moe.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")}
"""Dense blocks, where transformers saves them under the name of those with experts."""


def _own(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What published configs say of linear attention in a part of its own."""
    own = config.get("linear_attn_config")
    return own if isinstance(own, dict) else {}


def _meant(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json with the names that transformers saves, and the context under its usual name."""
    own = _own(config)
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
             "short_conv_kernel_size": "linear_conv_kernel_dim"}  # fmt: skip
    longest = config.get("max_position_embeddings", config.get("model_max_length"))
    return {**config, **{names[part]: own[part] for part in names if part in own}, "max_position_embeddings": longest}


def _attends(hyper: Hyper) -> list[bool]:
    """Which layers have latent attention; published configs count them from one."""
    kinds, numbers = hyper.config.get("layer_types"), _own(hyper.config).get("full_attn_layers")
    if isinstance(kinds, list):
        return [kind == "full_attention" for kind in kinds]
    return [layer + 1 in numbers for layer in range(hyper.layers)] if isinstance(numbers, list) else []


def _layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    return leading.then(_LATENT if _attends(hyper)[layer] else _DELTA, GATED, _SPARSE)(hyper, layer)


def _shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    if _attends(hyper)[layer]:
        return deepseek.latent_shapes(hyper)
    one, kernel = whole(hyper.config, "linear_head_dim"), whole(hyper.config, "linear_conv_kernel_dim")
    wide = hyper.heads * one
    return {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v"), (wide, hyper.hidden)),
        **dict.fromkeys(_CONVOLUTIONS, (1, wide, 1, kernel)),
        **dict.fromkeys(("ssm_f_a", "ssm_g_a"), (one, hyper.hidden)),
        **dict.fromkeys(("ssm_f_b", "ssm_g_b"), (wide, one)),
        "attn_output": (hyper.hidden, wide),
        "ssm_beta": (hyper.heads, hyper.hidden),
        "ssm_a": (1, 1, hyper.heads, 1),
        "ssm_dt.bias": (wide,),
        "ssm_norm": (one,),
    }


def _parts(path: str, shape: Shape, hyper: Hyper) -> Sequence[GGUFTensor] | None:
    name = next((name for end, name in _DENSE.items() if path.endswith(end)), None)
    return deepseek.latent_parts(path, shape, hyper) if name is None else (GGUFTensor(name, shape),)


def _keys(hyper: Hyper, rope: Rope) -> list[Key]:
    latent, plain, turned, values = deepseek.latent_sizes(hyper)
    return [
        leading.key(_ARCH, hyper),
        i32s(f"{_ARCH}.attention.head_count_kv", [int(attends) for attends in _attends(hyper)]),
        u32(f"{_ARCH}.attention.key_length", latent + turned),
        u32(f"{_ARCH}.attention.key_length_mla", plain + turned),
        u32(f"{_ARCH}.attention.value_length_mla", values),
        u32(f"{_ARCH}.expert_gating_func", leading.SIGMOID),
        u32(f"{_ARCH}.kda.head_dim", whole(hyper.config, "linear_head_dim")),
        u32(f"{_ARCH}.rope.dimension_count", turned),
    ]


def _objection(hyper: Hyper) -> str | None:
    if len(_attends(hyper)) != hyper.layers:
        return f"config.json: layer_types does not tell of {hyper.layers} layers"
    if (heads := whole(hyper.config, "linear_num_heads")) != hyper.heads:
        return f"config.json: linear_num_heads is {heads}, llama.cpp takes the {hyper.heads} of all attention"
    return leading.objection(hyper)


FAMILY = Family(
    "kimi_linear", ("kimi_linear",), _ARCH, experts=True, rotary=False, biases=(), meant=_meant,
    layer=_layer, shapes=_shapes, parts=_parts, keys=_keys, objection=_objection,
    forms={"ssm_a": "decay"}, reshaped=("ssm_a", *_CONVOLUTIONS),
    told=("kv_lora_rank", "linear_conv_kernel_dim", "moe_intermediate_size", "num_shared_experts",
          "routed_scaling_factor", "topk_group"),
    only={
        "hidden_act": ("silu", None), "moe_renormalize": (True, None), "num_expert_group": (1, None),
        "q_lora_rank": (None,), "moe_router_activation_func": ("sigmoid", None),
    },
)  # fmt: skip
