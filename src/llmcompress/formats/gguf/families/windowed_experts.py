"""Families with experts, and Granite's kin without, where a key tells which layers have a sliding window."""

from collections.abc import Mapping
from typing import Any

from llmcompress.formats.gguf.families import leading, llama
from llmcompress.formats.gguf.family import (
    ATTENTION,
    CHOICE,
    EXPERTS,
    GATED,
    SHARED_EXPERT,
    Family,
    Kin,
    Shape,
    renamed,
)
from llmcompress.formats.gguf.fields import GRANITE
from llmcompress.formats.gguf.hyper import Hyper
from llmcompress.formats.gguf.keys import Key, f32, flag, flags, i32s, u32
from llmcompress.formats.gguf.rope import Rope, read_rope
from llmcompress.formats.gguf.shapes import shared_width

_SILU = {"hidden_act": ("silu", None)}
_NO_BIAS = {**_SILU, "attention_bias": (False, None), "mlp_bias": (False, None)}
_NORMS = ("attn_q_norm", "attn_k_norm")
_WINDOW = ("sliding_window", "layer_types")
_FUSED = ("ffn_norm", "ffn_gate_inp", "ffn_gate_up_exps", "ffn_down_exps")
_FUSED_SHARED = ("ffn_up_shexp", "ffn_down_shexp")


def _windowed(hyper: Hyper) -> str | None:
    """Why llama.cpp would not find its windows, or None."""
    kinds = hyper.config.get("layer_types")
    if hyper.config.get("sliding_window") is None or not isinstance(kinds, list) or len(kinds) != hyper.layers:
        return f"config.json: sliding_window and layer_types do not tell of the windows of {hyper.layers} layers"
    return None


def _mellum_objection(hyper: Hyper) -> str | None:
    if "dense" in (hyper.config.get("mlp_layer_types") or ()):
        return "config.json: mlp_layer_types has a dense layer, llama.cpp computes mellum models with experts in all"
    if "sliding_attention" not in (hyper.config.get("layer_types") or ()):
        return None
    rope = read_rope(hyper.config)
    if rope.local_theta not in (None, rope.theta):
        return (
            "config.json: rope_theta of sliding attention is another one, llama.cpp rotates all layers of mellum alike"
        )
    return _windowed(hyper)


def _cohere_widths(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The width that is stated is that of an expert; dense layers may have one of their own."""
    inner = config.get("intermediate_size")
    dense = config.get("prefix_dense_intermediate_size") or inner
    return {**config, "moe_intermediate_size": inner, "intermediate_size": dense}


def _cohere_layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    shared = SHARED_EXPERT if hyper.config.get("num_shared_experts") else ()
    return leading.then(ATTENTION, GATED[1:], (*EXPERTS[1:], *shared))(hyper, layer)


def _cohere_keys(hyper: Hyper, rope: Rope) -> list[Key]:
    arch = "cohere2moe"
    sigmoid = hyper.config.get("expert_selection_fn") == "sigmoid"
    found = [
        leading.key(arch, hyper),
        u32(f"{arch}.rope.dimension_count", hyper.head_dim),
        u32(f"{arch}.expert_gating_func", leading.SIGMOID if sigmoid else leading.SOFTMAX),
        # a softmax over the chosen experts is one over all, made to sum to 1 again
        flag(f"{arch}.expert_weights_norm", not sigmoid or bool(hyper.config.get("norm_topk_prob"))),
    ]
    if hyper.config.get("num_shared_experts"):
        found.append(u32(f"{arch}.expert_shared_feed_forward_length", shared_width(hyper)))
    return found


def _cohere_objection(hyper: Hyper) -> str | None:
    return leading.objection(hyper) or _windowed(hyper)


def _heads(hyper: Hyper) -> list[int]:
    """Heads of queries by layer."""
    stated = hyper.config.get("num_attention_heads_per_layer")
    return list(stated) if isinstance(stated, list) and stated else [hyper.heads] * hyper.layers


def _laguna_shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    heads, hidden = _heads(hyper)[layer], hyper.hidden
    wide = heads * hyper.head_dim
    gates = heads if hyper.config.get("gating") in (True, "per-head") else wide
    return {"attn_q": (wide, hidden), "attn_output": (hidden, wide), "attn_gate": (gates, hidden)}


def _laguna_keys(hyper: Hyper, rope: Rope) -> list[Key]:
    local = (hyper.config.get("rope_parameters") or {}).get("sliding_attention") or {}
    found = [
        leading.key("laguna", hyper),
        i32s("laguna.attention.head_count", _heads(hyper)),
        flag("laguna.expert_weights_norm", True),
        u32("laguna.expert_gating_func", leading.SIGMOID),
    ]
    if local and rope.local_theta is not None:
        found.append(f32("laguna.rope.freq_base_swa", rope.local_theta))
        turned = int(hyper.head_dim * float(local.get("partial_rotary_factor", 1.0)))
        found.append(u32("laguna.rope.dimension_count_swa", turned))
    return found


def _laguna_objection(hyper: Hyper) -> str | None:
    if len(_heads(hyper)) != hyper.layers:
        return f"config.json: num_attention_heads_per_layer does not tell of {hyper.layers} layers"
    return leading.objection(hyper)


def _granite_keys(hyper: Hyper, rope: Rope) -> list[Key]:
    rotated = [bool(theta) for theta in hyper.config.get("layer_rope_theta") or ()]
    return [] if all(rotated) else [flags("granite_swa.attention.rope_pattern", rotated)]


def _granite_objection(hyper: Hyper) -> str | None:
    thetas = hyper.config.get("layer_rope_theta") or [1.0] * hyper.layers
    if len(thetas) != hyper.layers or len({theta for theta in thetas if theta}) > 1:
        return "config.json: layer_rope_theta has several bases, llama.cpp takes one for all layers that are rotated"
    return _windowed(hyper)


def _fused_layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    shared = _FUSED_SHARED if hyper.config.get("shared_intermediate_size") else ()
    return (*ATTENTION, "attn_sinks", *_FUSED, *shared)


def _fused_shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    return {
        "attn_sinks": (hyper.heads,),
        "ffn_gate_up_exps": (hyper.experts, 2 * hyper.inner, hyper.hidden),
        "ffn_up_shexp": (2 * shared_width(hyper), hyper.hidden),
    }


FAMILY = Kin(
    "windowed_experts",
    (
        Family(
            "mellum", ("mellum",), "mellum", named="qwen3moe", experts=True, head_needed=True,
            ropes=("default", "yarn"), windowed=True, biases=(), layer=(*ATTENTION, *_NORMS, *EXPERTS),
            told=("moe_intermediate_size", *_WINDOW),
            keys=lambda hyper, rope: [f32("mellum.rope.freq_base_swa", rope.theta)], objection=_mellum_objection,
            only={**_NO_BIAS, "norm_topk_prob": (True, None)},
        ),
        Family(
            "cohere2_moe", ("cohere2_moe",), "cohere2moe", named="step35", tied=True, rms=False, experts=True,
            ropes=("default",), windowed=True, biases=(), layer=_cohere_layer, meant=_cohere_widths, keys=_cohere_keys,
            told=("logit_scale", "moe_intermediate_size", "num_shared_experts", *_WINDOW), objection=_cohere_objection,
            only={**_NO_BIAS, "shared_expert_combination_strategy": ("average", None),
                  "prefix_dense_sliding_window_pattern": (1, None)},
        ),
        Family(
            "laguna", ("laguna",), "laguna", named="step35", experts=True, ropes=("default", "yarn"), windowed=True,
            partly=True, biases=(), shapes=_laguna_shapes, parts=renamed({".e_score_correction_bias": CHOICE}),
            layer=leading.then((*ATTENTION, *_NORMS, "attn_gate"), GATED, (*EXPERTS, CHOICE, *SHARED_EXPERT)),
            told=("moe_intermediate_size", "shared_expert_intermediate_size", "moe_routed_scaling_factor", *_WINDOW),
            keys=_laguna_keys, objection=_laguna_objection,
            only={**_NO_BIAS, "gating": (True, "per-head", "per-element"), "moe_router_logit_softcapping": (0, None),
                  "moe_apply_router_weight_on_input": (False, None)},
        ),
        Family(
            "granite_swa", ("granite_swa",), "granite_swa", named="mimo2", tied=True, ropes=("default", "llama3"),
            partly=True, windowed=True, rows=llama.rows, values=llama.values, biases=(), told=(*GRANITE, *_WINDOW),
            layer=(*ATTENTION, "attn_sinks", *GATED), shapes=lambda hyper, layer: {"attn_sinks": (hyper.heads,)},
            keys=_granite_keys, objection=_granite_objection, only=_NO_BIAS,
        ),
        Family(
            "granitemoe_swa", ("granitemoe_swa",), "granite_swa", named="mimo2", experts=True,
            ropes=("default", "llama3"), partly=True, windowed=True, rows=llama.rows, values=llama.values, biases=(),
            told=(*GRANITE, *_WINDOW, "shared_intermediate_size"), layer=_fused_layer, shapes=_fused_shapes,
            parts=renamed({
                ".block_sparse_moe.router.weight": "ffn_gate_inp.weight",
                ".block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps.weight",
                ".shared_mlp.input_linear.weight": "ffn_up_shexp.weight",
                ".shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
            }),
            keys=_granite_keys, objection=_granite_objection, only=_NO_BIAS,
        ),
    ),
)  # fmt: skip
