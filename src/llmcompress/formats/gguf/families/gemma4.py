"""Gemma 4 (text): heads of two sizes, shared keys and values, embeddings by layer, experts beside a dense block."""

from collections.abc import Mapping
from typing import Any

from llmcompress.formats.gguf.family import GATED, Family, Shape, renamed
from llmcompress.formats.gguf.hyper import Hyper, whole
from llmcompress.formats.gguf.keys import Key, f32, i32s, u32
from llmcompress.formats.gguf.rope import Rope

_ALWAYS = ("attn_norm", "attn_q", "attn_q_norm", "attn_output", "post_attention_norm", *GATED, "post_ffw_norm",
           "layer_output_scale")  # fmt: skip
_BY_LAYER = ("inp_gate", "proj", "post_norm")
_EXPERTS = ("ffn_gate_inp", "ffn_gate_inp.scale", "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2",
            "ffn_gate_up_exps", "ffn_down_exps", "ffn_down_exps.scale")  # fmt: skip
_OUTER = ("per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm")
_NAMES = {
    ".layer_scalar": "layer_output_scale.weight",
    ".router.scale": "ffn_gate_inp.scale",
    ".router.per_expert_scale": "ffn_down_exps.scale",
    ".experts.gate_up_proj": "ffn_gate_up_exps.weight",
    ".experts.down_proj": "ffn_down_exps.weight",
}
_UNTURNED = 1e30  # what divides the frequencies of values that are not rotated


def _meant(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without experts, unless they are enabled."""
    if config.get("enable_moe_block"):
        return config
    return {key: value for key, value in config.items() if key not in ("num_experts", "moe_intermediate_size")}


def _full(hyper: Hyper) -> list[bool]:
    """Of each layer, whether it attends to all that came before."""
    return [kind == "full_attention" for kind in hyper.config["layer_types"]]


def _of_full(hyper: Hyper, name: str, usual: int) -> int:
    """What layers of full attention have in place of a usual size."""
    stated = hyper.config.get({"head_dim": "global_head_dim"}.get(name, "num_global_key_value_heads"))
    by_layer = hyper.config.get("per_layer_config") or {}
    for layer, full in enumerate(_full(hyper)):
        if full and stated is None:
            stated = (by_layer.get(str(layer)) or {}).get(name)
    return usual if stated is None else whole({name: stated}, name)


def _wide(hyper: Hyper) -> int:
    """Embedding by layer of a token; 0 without."""
    return int(hyper.config.get("hidden_size_per_layer_input") or 0)


def _shares(hyper: Hyper, layer: int) -> bool:
    """Whether a layer takes keys and values of an earlier one."""
    return layer >= hyper.layers - int(hyper.config.get("num_kv_shared_layers") or 0)


def _inner(hyper: Hyper, layer: int) -> int:
    return 2 * hyper.inner if hyper.config.get("use_double_wide_mlp") and _shares(hyper, layer) else hyper.inner


def _layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    own: tuple[str, ...] = () if _shares(hyper, layer) else ("attn_k", "attn_k_norm")
    if own and not (hyper.config.get("attention_k_eq_v") and _full(hyper)[layer]):
        own = (*own, "attn_v")
    return (*_ALWAYS, *own, *(_BY_LAYER if _wide(hyper) else ()), *(_EXPERTS if hyper.experts else ()))


def _shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    wide, hidden = _wide(hyper), hyper.hidden
    if layer < 0:
        return {
            "per_layer_token_embd": (hyper.vocabulary, wide * hyper.layers),
            "per_layer_model_proj": (wide * hyper.layers, hidden),
            "per_layer_proj_norm": (wide,),
        }
    full, inner = _full(hyper)[layer], _inner(hyper, layer)
    one = _of_full(hyper, "head_dim", hyper.head_dim) if full else hyper.head_dim
    pairs = _of_full(hyper, "num_key_value_heads", hyper.heads_kv) if full else hyper.heads_kv
    return {
        "attn_q": (hyper.heads * one, hidden),
        **dict.fromkeys(("attn_k", "attn_v"), (pairs * one, hidden)),
        **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (one,)),
        "attn_output": (hidden, hyper.heads * one),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (inner, hidden)),
        "ffn_down": (hidden, inner),
        "layer_output_scale": (1,),
        "inp_gate": (wide, hidden),
        "proj": (hidden, wide),
        **dict.fromkeys(("post_norm", "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"), (hidden,)),
        "ffn_gate_inp.scale": (hidden,),
        "ffn_gate_up_exps": (hyper.experts, 2 * hyper.expert_inner, hidden),
        "ffn_down_exps.scale": (hyper.experts,),
    }


def _values(hyper: Hyper, rope: Rope) -> Mapping[str, tuple[float, ...]]:
    pairs = _of_full(hyper, "head_dim", hyper.head_dim) // 2
    turned = int(rope.partial * pairs)
    return {"rope_freqs.weight": (1.0,) * turned + (_UNTURNED,) * (pairs - turned)}


def _keys(hyper: Hyper, rope: Rope) -> list[Key]:
    one, full = _of_full(hyper, "head_dim", hyper.head_dim), _full(hyper)
    pairs = _of_full(hyper, "num_key_value_heads", hyper.heads_kv)
    found = [
        *(u32(f"gemma4.attention.{kind}_length", one) for kind in ("key", "value")),
        *(u32(f"gemma4.attention.{kind}_length_swa", hyper.head_dim) for kind in ("key", "value")),
        u32("gemma4.rope.dimension_count", one),
        u32("gemma4.rope.dimension_count_swa", hyper.head_dim),
        u32("gemma4.embedding_length_per_layer_input", _wide(hyper)),
    ]
    if hyper.config.get("final_logit_softcapping") is None:
        found.append(f32("gemma4.final_logit_softcapping", 0.0))  # llama.cpp takes 30 where none is given
    if rope.local_theta is not None:
        found.append(f32("gemma4.rope.freq_base_swa", rope.local_theta))
    if pairs != hyper.heads_kv:
        by_layer = (pairs if item else hyper.heads_kv for item in full)
        found.append(i32s("gemma4.attention.head_count_kv", by_layer))
    if hyper.config.get("use_double_wide_mlp"):
        widths = (_inner(hyper, layer) for layer in range(hyper.layers))
        found.append(i32s("gemma4.feed_forward_length", widths))
    return found


def _objection(hyper: Hyper) -> str | None:
    kinds = hyper.config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != hyper.layers or "full_attention" not in kinds:
        return f"config.json: layer_types does not tell of {hyper.layers} layers, one of them of full attention"
    if hyper.config.get("vocab_size_per_layer_input") not in (None, hyper.vocabulary) and _wide(hyper):
        return "config.json: vocab_size_per_layer_input is not vocab_size, llama.cpp takes them for the same"
    return None


FAMILY = Family(
    name="gemma4",
    model_types=("gemma4_text",),
    arch="gemma4",
    tied=True,
    experts=True,
    ropes=("proportional",),
    windowed=True,
    layer=_layer,
    outer=lambda hyper: _OUTER if _wide(hyper) else (),
    biases=(),
    shapes=_shapes,
    parts=renamed(_NAMES),
    values=_values,
    keys=_keys,
    told=("sliding_window", "layer_types", "num_kv_shared_layers", "final_logit_softcapping", "moe_intermediate_size"),
    meant=_meant,
    objection=_objection,
    only={
        "hidden_activation": ("gelu_pytorch_tanh", None),
        "attention_bias": (False, None),
        "use_bidirectional_attention": (None,),
    },
)
