"""MiMo V2 Flash: windows with sinks and twice the heads of keys and values, and heads of values of another width."""

from collections.abc import Mapping
from typing import Any

from llmcompress.formats.gguf.families import leading
from llmcompress.formats.gguf.family import ATTENTION, CHOICE, EXPERTS, GATED, Family, Shape, renamed
from llmcompress.formats.gguf.hyper import Hyper, number, whole
from llmcompress.formats.gguf.keys import Key, f32, i32s, u32
from llmcompress.formats.gguf.rope import Rope

_EXPERTS = (*EXPERTS, CHOICE)


def _meant(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With what published configs say under names of their own."""
    kinds = [
        ["full_attention", "sliding_attention"][bool(slides)] for slides in config.get("hybrid_layer_pattern") or ()
    ]
    said = {"layer_types": kinds or None, "rope_local_base_freq": config.get("swa_rope_theta")}
    said["rms_norm_eps"] = config.get("layernorm_epsilon")
    return {**config, **{key: value for key, value in said.items() if value is not None and config.get(key) is None}}


def _slides(hyper: Hyper) -> list[bool]:
    return [kind == "sliding_attention" for kind in hyper.config.get("layer_types") or ()]


def _pairs(hyper: Hyper, layer: int) -> int:
    """Heads of keys and values of a layer."""
    if not _slides(hyper)[layer]:
        return hyper.heads_kv
    return int(hyper.config.get("swa_num_key_value_heads") or 2 * hyper.heads_kv)


def _layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    sinks = ("attn_sinks",) if _slides(hyper)[layer] else ()
    return leading.then((*ATTENTION, *sinks), GATED, _EXPERTS)(hyper, layer)


def _shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    pairs, values = _pairs(hyper, layer), whole(hyper.config, "v_head_dim")
    return {
        "attn_k": (pairs * hyper.head_dim, hyper.hidden),
        "attn_v": (pairs * values, hyper.hidden),
        "attn_output": (hyper.hidden, hyper.heads * values),
        "attn_sinks": (hyper.heads,),
    }


def _keys(hyper: Hyper, rope: Rope) -> list[Key]:
    found = [
        i32s("mimo2.attention.head_count_kv", (_pairs(hyper, layer) for layer in range(hyper.layers))),
        i32s("mimo2.attention.sliding_window_pattern", map(int, _slides(hyper))),
        u32("mimo2.attention.value_length", whole(hyper.config, "v_head_dim")),
    ]
    if rope.local_theta is not None:
        found.append(f32("mimo2.rope.freq_base_swa", rope.local_theta))
    if hyper.config.get("attention_value_scale") is not None:
        found.append(f32("mimo2.attention.value_scale", number(hyper.config, "attention_value_scale")))
    return found


def _objection(hyper: Hyper) -> str | None:
    if hyper.config.get("sliding_window") is None or len(_slides(hyper)) != hyper.layers:
        return f"config.json: sliding_window and layer_types do not tell of the windows of {hyper.layers} layers"
    return leading.objection(hyper)


FAMILY = Family(
    name="mimo_v2_flash",
    model_types=("mimo_v2_flash",),
    arch="mimo2",
    experts=True,
    head_needed=True,
    ropes=("default",),
    partly=True,
    windowed=True,
    layer=_layer,
    biases=(),
    told=("moe_intermediate_size", "sliding_window", "n_group", "topk_group"),
    shapes=_shapes,
    parts=renamed({".self_attn.attention_sink_bias": "attn_sinks.weight"}),
    meant=_meant,
    keys=_keys,
    objection=_objection,
    only={
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "n_group": (1, None),
        "norm_topk_prob": (True, None),
        "routed_scaling_factor": (1.0, None),
    },
)
