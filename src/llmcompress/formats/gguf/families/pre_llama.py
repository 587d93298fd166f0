"""Older families: learned positions or none, one matrix for queries, keys and values, biases in most places."""

from collections.abc import Mapping
from typing import Any

from llmcompress.formats.gguf.family import Family, Kin
from llmcompress.formats.gguf.hyper import Hyper
from llmcompress.formats.gguf.keys import Key, f32, text
from llmcompress.formats.gguf.rope import Rope
from llmcompress.formats.gguf.tensors import Rows, Strips, parted

_LAYER = ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down")
_NO_NORM = ("attn_norm", "attn_qkv", "attn_output", "ffn_up", "ffn_down")


def _bloom_rows(role: str, hyper: Hyper) -> Rows | None:
    return parted(hyper.heads, hyper.head_dim) if role == "attn_qkv" else None


def _shared_pair(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """All queries share one head of keys and values, unless each group of queries has its own."""
    if config.get("multi_query", True) and not config.get("new_decoder_architecture"):
        return {**config, "num_kv_heads": 1, "num_key_value_heads": 1}
    return config


def _falcon_rows(role: str, hyper: Hyper) -> Strips | None:
    """Groups of queries, each followed by a key and a value: all queries, all keys, all values."""
    if role != "attn_qkv":
        return None
    pairs, one = hyper.heads_kv, hyper.head_dim
    wide = hyper.heads // pairs * one
    step = wide + 2 * one
    return Strips(((0, wide, step, pairs), (wide, one, step, pairs), (wide + one, one, step, pairs)))


def _falcon_layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    two = hyper.config.get("new_decoder_architecture") and hyper.config.get("num_ln_in_parallel_attn") in (None, 2)
    return (*_NO_NORM, "attn_norm_2") if two else _NO_NORM


def _falcon_objection(hyper: Hyper) -> str | None:
    config = hyper.config
    if config.get("alibi") or config.get("bias") or config.get("parallel_attn") is False:
        return "config.json: alibi, bias or parallel_attn is not as in the Falcon models that llama.cpp knows"
    if not config.get("new_decoder_architecture") and config.get("multi_query") is False:
        return "config.json: multi_query is false without new_decoder_architecture, which llama.cpp does not know"
    return None


def _mpt_keys(hyper: Hyper, rope: Rope) -> list[Key]:
    attention = hyper.config.get("attn_config") or {}
    return [f32("mpt.attention.max_alibi_bias", attention.get("alibi_bias_max", 8))]


def _mpt_objection(hyper: Hyper) -> str | None:
    attention = hyper.config.get("attn_config") or {}
    plain = not attention.get("clip_qkv") and not attention.get("qk_ln") and attention.get("softmax_scale") is None
    if plain and attention.get("alibi", True):
        return None
    return "config.json: attn_config is not plain attention with biases by distance (alibi)"


FAMILY = Kin(
    "pre_llama",
    (
        Family(
            "bloom", ("bloom",), "bloom", base="transformer.", tied=True, grouped=False, rotary=False, square=True,
            rms=False, layer=_LAYER, outer=("token_embd_norm",), biased=("token_embd_norm", "output_norm", *_LAYER),
            biases=(), rows=_bloom_rows, defaults={"max_position_embeddings": 2048},
            only={"apply_residual_connection_post_layernorm": (False, None)},
        ),
        Family(
            "gpt_bigcode", ("gpt_bigcode",), "starcoder", base="transformer.", tied=True, rotary=False, square=True,
            rms=False, layer=_LAYER, outer=("position_embd",), biased=("output_norm", *_LAYER), biases=(),
            meant=_shared_pair,
            only={"activation_function": ("gelu_pytorch_tanh", "gelu_new"), "multi_query": (True, None),
                  "scale_attn_weights": (True, None)},
        ),
        Family(
            "mpt", ("mpt",), "mpt", base="transformer.", tied=True, grouped=False, rotary=False, square=True, rms=False,
            layer=_LAYER, biases=(), keys=_mpt_keys, objection=_mpt_objection,
            only={"no_bias": (True,), "expansion_ratio": (4, None)},
        ),
        Family(
            "falcon", ("falcon",), "falcon", base="transformer.", tied=True, square=True, rms=False,
            ropes=("default",), layer=_falcon_layer, biased=("output_norm", "attn_norm", "attn_norm_2"), biases=(),
            shapes=lambda hyper, layer: {"attn_norm_2": (hyper.hidden,)}, rows=_falcon_rows,
            keys=lambda hyper, rope: [text("falcon.tensor_data_layout", "jploski")], objection=_falcon_objection,
            meant=_shared_pair, defaults={"max_position_embeddings": 2048}, only={"activation": ("gelu", None)},
        ),
    ),
)  # fmt: skip
