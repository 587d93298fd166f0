"""Gemma 3n (text): four streams of hidden states, embeddings by layer, sparse blocks, shared keys and values.

llama.cpp has most of its sizes built in, and asks for keys and values of layers that take those of earlier ones too,
without using them; transformers does not save them.
"""

from collections.abc import Mapping
from math import inf
from typing import Any

from llmcompress.errors import PlanError
from llmcompress.formats.gguf.family import ATTENTION, GATED, Family, Shape
from llmcompress.formats.gguf.hyper import Hyper
from llmcompress.formats.gguf.keys import Key, f32, f32s, i32s, u32
from llmcompress.formats.gguf.rope import Rope

_STREAMS, _RANK, _WIDE = 4, 64, 256
_OWN = 20  # layers with keys and values of their own
_SPARSE = 10  # layers whose gates let 5% through
_CUT_OFF = {
    0.95: 1.6448533535003662,
    0.0: -inf,
}  # in standard deviations: quantiles of the normal distribution, float32
_LAYER = (*ATTENTION, "attn_q_norm", "attn_k_norm", "post_attention_norm", *GATED, "post_ffw_norm", "inp_gate", "proj",
          "post_norm", "altup_correct_coef", "altup_correct_scale", "altup_predict_coef", "altup_router",
          "altup_router_norm", "laurel_l", "laurel_r", "laurel_post_norm")  # fmt: skip
_OUTER = ("per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm", "altup_proj", "altup_unembd_proj")


def _meant(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Itself; PlanError for feed-forward blocks of several widths."""
    widths = config.get("intermediate_size")
    if isinstance(widths, list) and len(set(map(str, widths))) > 1:
        raise PlanError("config.json: intermediate_size has several widths, llama.cpp takes that of the first layer")
    return config


def _sparsity(hyper: Hyper) -> list[float]:
    """The share of a gate that each layer leaves out."""
    stated = hyper.config.get("activation_sparsity_pattern")
    usual = [0.95 if layer < _SPARSE < hyper.layers else 0.0 for layer in range(hyper.layers)]
    return usual if stated is None else list(stated) if isinstance(stated, list) else [stated] * hyper.layers


def _objection(hyper: Hyper) -> str | None:
    shared, kinds = hyper.config["num_kv_shared_layers"], hyper.config.get("layer_types")
    if not isinstance(shared, int) or hyper.layers - shared != _OWN:
        return (
            f"config.json: num_kv_shared_layers is {shared!r} of {hyper.layers} layers, llama.cpp computes gemma3n "
            f"models with {_OWN} others"
        )
    if not isinstance(kinds, list) or len(kinds) != hyper.layers:
        return f"config.json: layer_types does not tell of {hyper.layers} layers"
    if shared and kinds[_OWN - 2 : _OWN] != ["sliding_attention", "full_attention"]:
        return (
            f"config.json: layer_types of layers {_OWN - 2} and {_OWN - 1} are {' and '.join(kinds[_OWN - 2 : _OWN])}, "
            "llama.cpp takes shared keys of sliding attention from the one, of full attention from the other"
        )
    if _sparsity(hyper) != [0.95] * _SPARSE + [0.0] * (hyper.layers - _SPARSE):
        return (
            f"config.json: activation_sparsity_pattern is not 0.95 in {_SPARSE} layers and then 0, which llama.cpp "
            "takes for granted in gemma3n models"
        )
    return None


def _shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    hidden = hyper.hidden
    if layer < 0:
        return {
            "per_layer_token_embd": (hyper.vocabulary, _WIDE * hyper.layers),
            "per_layer_model_proj": (_WIDE * hyper.layers, hidden),
            "per_layer_proj_norm": (_WIDE,),
            **dict.fromkeys(("altup_proj", "altup_unembd_proj"), (_STREAMS - 1, hidden, hidden)),
        }
    return {
        "inp_gate": (_WIDE, hidden),
        "proj": (hidden, _WIDE),
        **dict.fromkeys(("post_norm", "altup_correct_scale", "altup_router_norm", "laurel_post_norm"), (hidden,)),
        "altup_correct_coef": (_STREAMS, _STREAMS),
        "altup_predict_coef": (_STREAMS**2, _STREAMS),
        "altup_router": (_STREAMS, hidden),
        "laurel_l": (_RANK, hidden),
        "laurel_r": (hidden, _RANK),
    }


def _keys(hyper: Hyper, rope: Rope) -> list[Key]:
    found = [
        u32("gemma3n.altup.active_idx", 0),
        u32("gemma3n.altup.num_inputs", _STREAMS),
        u32("gemma3n.embedding_length_per_layer_input", _WIDE),
        f32s("gemma3n.activation_sparsity_scale", (_CUT_OFF[share] for share in _sparsity(hyper))),
    ]
    if rope.local_theta is not None:
        found.append(f32("gemma3n.rope.freq_base_swa", rope.local_theta))
    if isinstance(hyper.config["intermediate_size"], list):
        found.append(i32s("gemma3n.feed_forward_length", hyper.config["intermediate_size"]))
    return found


FAMILY = Family(
    name="gemma3n",
    model_types=("gemma3n_text",),
    arch="gemma3n",
    tied=True,
    ropes=("default",),
    windowed=True,
    layer=_LAYER,
    unused=lambda hyper, layer: () if layer < _OWN else ("attn_k", "attn_v", "attn_k_norm"),
    outer=lambda hyper: _OUTER,
    biases=(),
    shapes=_shapes,
    stacked={"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"},
    lengthened={"per_layer_token_embd": "vocab_size_per_layer_input"},
    keys=_keys,
    told=("sliding_window", "layer_types", "num_kv_shared_layers", "final_logit_softcapping"),
    meant=_meant,
    defaults={
        "num_kv_shared_layers": 15,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": _WIDE,
        "laurel_rank": _RANK,
        "altup_num_inputs": _STREAMS,
    },
    only={
        "hidden_activation": ("gelu_pytorch_tanh", None),
        "attention_bias": (False, None),
        "final_logit_softcapping": (30.0,),
        "hidden_size_per_layer_input": (_WIDE,),
        "laurel_rank": (_RANK,),
        "altup_num_inputs": (_STREAMS,),
        "altup_active_idx": (0, None),
        "altup_correct_scale": (True, None),
    },
    objection=_objection,
)
