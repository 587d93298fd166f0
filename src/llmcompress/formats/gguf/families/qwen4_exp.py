"""Qwen4-Exp: Qwen3.5's layers between mixed streams, keys chosen by an index, and a layer that reads n-grams."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count, islice
from math import ceil, isqrt

from llmcompress.formats.gguf.families import gated_delta
from llmcompress.formats.gguf.family import ATTENTION, EXPERTS, SHARED_EXPERT, Family, Shape
from llmcompress.formats.gguf.hyper import Hyper, number, whole
from llmcompress.formats.gguf.keys import Key, i32s, u32
from llmcompress.formats.gguf.rope import Rope
from llmcompress.formats.gguf.tensors import GGUFTensor, stretch

_ARCH = "qwen4exp"
_LONGEST, _MOST = 8, 64  # n-grams of so many tokens, and heads, are what llama.cpp has room for
_INDEX = ("indexer.q_proj", "indexer.k_proj", "indexer.q_norm", "indexer.k_norm")
_FULL = (*ATTENTION[1:], "attn_q_norm", "attn_k_norm", *_INDEX)
_LINEAR = (*gated_delta.LINEAR[1:], "ssm_beta", "ssm_alpha")
_GRAMS = ("ple_key", "ple_value", "ple_norm_key", "ple_norm_query", "ple_norm_conv", "ple_conv1d")
_SPARSE = (*EXPERTS[1:], *SHARED_EXPERT, "ffn_gate_inp_shexp")
_MIXED = {
    "hc_norm": "norm",
    "input_mix_weight_down": "down",
    "input_mix_weight_up": "up",
    "block_inject_weight": "inject",
}
_MIXERS = {"attn_hyper_connection": "hc_attn", "mlp_hyper_connection": "hc_ffn", "hyper_connection_mixer": "output_hc"}
_NAMES = {
    **{
        f".{mixer}.{theirs}.weight": f"{name}_{ours}.weight"
        for mixer, name in _MIXERS.items()
        for theirs, ours in _MIXED.items()
    },
    **{f".self_attn.indexer.{side}_layernorm.weight": f"indexer.{side}_norm.weight" for side in "qk"},
    **{f".ple.{side}_proj.weight": f"ple_{side}.weight" for side in ("key", "value")},
    ".ple.conv1d.weight": "ple_conv1d.weight",
}
_GRAM_NORMS = {f".ple.norm_{role}.weight": f"ple_norm_{role}.weight" for role in ("key", "query", "conv")}


def _mixers(*ends: str) -> tuple[str, ...]:
    return tuple(f"{mixer}_{end}" for mixer in ("hc_attn", "hc_ffn") for end in ends)


def _reads_grams(hyper: Hyper) -> list[int]:
    """Numbers of the layers that read n-grams; config.json counts them from one."""
    return [layer - 1 for layer in hyper.config.get("ple_layer_ids") or ()]


@cache
def _primes(start: int, wanted: int) -> tuple[int, ...]:
    """The first primes from `start` on, as many as are wanted."""
    found = (one for one in count(start) if one > 1 and all(one % other for other in range(2, isqrt(one) + 1)))
    return tuple(islice(found, wanted))


def _heads(hyper: Hyper) -> int:
    """Heads of all lengths of n-grams together."""
    return whole(hyper.config, "heads_per_ngram") * (whole(hyper.config, "ngram_size") - 1)


def _table(hyper: Hyper) -> Shape:
    """Rows and width of the embeddings of n-grams: a prime number of rows for each head, all padded together."""
    base, padded = (
        whole(hyper.config, name) for name in ("ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by")
    )
    heads = _heads(hyper)
    return ceil(sum(_primes(base, heads)) / padded) * padded, hyper.hidden // heads


def _layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    linear = gated_delta.kinds(hyper)[layer]
    grams = _GRAMS if layer in _reads_grams(hyper) else ()
    return (*(_LINEAR if linear else _FULL), *grams, *_mixers("norm", "down", "up", "inject"), *_SPARSE)


def _shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    streams, rank = whole(hyper.config, "hc_count"), whole(hyper.config, "hc_lowrank")
    wide, hidden = streams * hyper.hidden, hyper.hidden
    if layer < 0:
        mixer = {"output_hc_norm": (wide,), "output_hc_down": (rank, wide), "output_hc_up": (wide, rank)}
        return {**mixer, **({"per_layer_token_embd": _table(hyper)} if _reads_grams(hyper) else {})}
    heads, one = whole(hyper.config, "indexer_n_heads"), whole(hyper.config, "indexer_head_dim")
    return {
        **gated_delta.shapes(hyper, layer),
        **dict.fromkeys(_mixers("norm"), (wide,)),
        **dict.fromkeys(_mixers("down"), (rank, wide)),
        **dict.fromkeys(_mixers("up"), (wide, rank)),
        **dict.fromkeys(_mixers("inject"), (streams, wide)),
        **dict.fromkeys(("ple_norm_key", "ple_norm_query", "ple_norm_conv"), (wide,)),
        "ple_key": (wide, hidden),
        "ple_value": (hidden, hidden),
        "ple_conv1d": (wide, hyper.config.get("ple_conv_kernel_size") or 4),
        "indexer.q_proj": (heads * one, hidden),
        "indexer.k_proj": (one, hidden),
        "indexer.q_norm": (one,),
        "indexer.k_norm": (one,),
    }


def _parts(path: str, shape: Shape, hyper: Hyper) -> Sequence[GGUFTensor] | None:
    """Queries and keys of the index, which are one matrix; norms of n-grams, whose names do not say so at the end."""
    if path.endswith(".index_qk_proj.weight"):
        one = whole(hyper.config, "indexer_head_dim")
        queries = max(0, shape[0] - one)
        return [
            GGUFTensor("indexer.q_proj.weight", (queries, shape[1]), rows=stretch(0, queries, shape[0])),
            GGUFTensor("indexer.k_proj.weight", (one, shape[1]), rows=stretch(queries, one, shape[0])),
        ]
    for names, offset in ((_NAMES, 0.0), (_GRAM_NORMS, 1.0)):
        if name := next((name for end, name in names.items() if path.endswith(end)), None):
            return (GGUFTensor(name, shape, offset=offset),)
    return None


def _keys(hyper: Hyper, rope: Rope) -> list[Key]:
    config, grams = hyper.config, _reads_grams(hyper)
    ratio = whole(config, "indexer_compress_ratio")
    found = [
        *gated_delta.sectioned(_ARCH, hyper, rope),
        u32(f"{_ARCH}.hyper_connection.count", whole(config, "hc_count")),
        u32(f"{_ARCH}.hyper_connection.low_rank", whole(config, "hc_lowrank")),
        u32(f"{_ARCH}.attention.indexer.head_count", whole(config, "indexer_n_heads")),
        u32(f"{_ARCH}.attention.indexer.key_length", whole(config, "indexer_head_dim")),
        u32(f"{_ARCH}.attention.indexer.top_k", whole(config, "indexer_budget")),
        i32s(f"{_ARCH}.attention.compress_ratios", (0 if linear else ratio for linear in gated_delta.kinds(hyper))),
    ]
    if not grams:
        return found
    ends = config.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends  # the first, as in transformers
    return [
        *found,
        i32s(f"{_ARCH}.ple.layers", grams),
        u32(f"{_ARCH}.ple.ngram_size", whole(config, "ngram_size")),
        u32(f"{_ARCH}.ple.heads_per_ngram", whole(config, "heads_per_ngram")),
        u32(f"{_ARCH}.ple.conv_kernel", whole(config, "ple_conv_kernel_size")),
        u32(f"{_ARCH}.ple.eos_token_id", int(number({"eos_token_id": end}, "eos_token_id"))),
        u32(f"{_ARCH}.embedding_length_per_layer_input", _table(hyper)[1]),
    ]


def _objection(hyper: Hyper) -> str | None:
    config, grams = hyper.config, _reads_grams(hyper)
    if len(grams) > 1:
        return f"config.json: ple_layer_ids are {config['ple_layer_ids']}, llama.cpp knows one layer that reads n-grams"
    if grams and config.get("ple_embed_dim") not in (hyper.hidden, None):
        return f"config.json: ple_embed_dim is {config['ple_embed_dim']}, llama.cpp takes the width of the model"
    if grams and not (2 <= whole(config, "ngram_size") <= _LONGEST and 0 < _heads(hyper) <= _MOST):
        return (
            f"config.json: {_heads(hyper)} heads of n-grams of {config['ngram_size']} tokens, llama.cpp knows up to "
            f"{_MOST} of {_LONGEST}"
        )
    if whole(config, "linear_value_head_dim") != whole(config, "linear_key_head_dim"):
        return "config.json: linear_value_head_dim is not linear_key_head_dim, llama.cpp knows one of both"
    sections = (config.get("rope_parameters") or {}).get("mrope_section") or gated_delta.SECTIONS
    if sum(sections) > (one := min(hyper.head_dim, whole(config, "indexer_head_dim"))):
        return f"config.json: mrope_section {list(sections)} is more than llama.cpp takes of heads of {one}"
    return gated_delta.objection(hyper)


FAMILY = Family(
    "qwen4_exp", ("qwen4_exp_text",), _ARCH, named="qwen35moe", experts=True, partly=True, norm_offset=1.0, biases=(),
    unnormed=True, ropes=("default",), skipped=("mtp.",), forms={"ssm_a": "decay"}, rows=gated_delta.rows,
    inputs=gated_delta.inputs, layer=_layer, shapes=_shapes, parts=_parts, keys=_keys, objection=_objection,
    outer=lambda hyper: tuple(_shapes(hyper, -1)), stacked={"ngram_embedding": "per_layer_token_embd"},
    told=(*gated_delta.TOLD, *gated_delta.WIDTHS),
    lists={
        f"{_ARCH}.ple.layer_multipliers": ".ple_embedding.layer_multipliers",
        f"{_ARCH}.ple.head_offsets": ".ple_embedding.ngram_heads_offsets",
        f"{_ARCH}.ple.head_vocab_sizes": ".ple_embedding.ngram_heads_vocab_sizes",
    },
    only={**gated_delta.ONLY, "output_gate_type": ("sigmoid",), "attention_bias": (False, None)},
)  # fmt: skip
