"""The text part of MiniMax-M3: blocks of keys chosen by an index in layers with experts, gates clamped as GPT-OSS'."""

from collections.abc import Mapping, Sequence
from typing import Any

from llmcompress.formats.gguf.families import leading
from llmcompress.formats.gguf.family import ATTENTION, CHOICE, EXPERTS, GATED, SHARED_EXPERT, Family, Shape, renamed
from llmcompress.formats.gguf.hyper import Hyper, whole
from llmcompress.formats.gguf.keys import Key, flag, u32
from llmcompress.formats.gguf.rope import Rope, read_rope
from llmcompress.formats.gguf.shapes import shared_width
from llmcompress.formats.gguf.tensors import GGUFTensor, stretch

_ARCH = "minimax-m3"
_ATTENTION = (*ATTENTION, "attn_q_norm", "attn_k_norm")
_INDEX = ("indexer.q_proj", "indexer.k_proj", "indexer.q_norm", "indexer.k_norm")
_NAMES = {
    f".self_attn.{index}{role}.weight": f"indexer.{role}.weight"
    for role in ("q_proj", "k_proj", "q_norm", "k_norm")
    for index in ("indexer.", "index_")  # as transformers saves them, and as they are published
}


def _meant(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json with the widths of dense blocks and of experts under their usual names."""
    inner, dense = config.get("intermediate_size"), config.get("dense_intermediate_size")
    return {**config, "moe_intermediate_size": inner, "intermediate_size": dense}


def _sparse(hyper: Hyper, layer: int) -> bool:
    return layer >= leading.dense(hyper)


def _shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    heads, one = whole(hyper.config, "index_n_heads"), whole(hyper.config, "index_head_dim")
    return {
        "indexer.q_proj": (heads * one, hyper.hidden),
        "indexer.k_proj": (one, hyper.hidden),
        "indexer.q_norm": (one,),
        "indexer.k_norm": (one,),
    }


def _parts(path: str, shape: Shape, hyper: Hyper) -> Sequence[GGUFTensor] | None:
    """Gate and up of dense blocks and shared experts, which transformers saves as one; the index by its names."""
    if not path.endswith(".gate_up_proj.weight") or len(shape) != 2 or shape[0] % 2:
        return renamed(_NAMES)(path, shape, hyper)
    end, half = ("_shexp" if ".shared_experts." in path else ""), shape[0] // 2
    return [
        GGUFTensor(f"ffn_{leaf}{end}.weight", (half, shape[1]), rows=stretch(first, half, shape[0]))
        for leaf, first in (("gate", 0), ("up", half))
    ]


def _keys(hyper: Hyper, rope: Rope) -> list[Key]:
    return [
        leading.key(_ARCH, hyper),
        u32(f"{_ARCH}.expert_gating_func", leading.SIGMOID),
        u32(f"{_ARCH}.expert_shared_count", shared_width(hyper) // hyper.expert_inner),
        flag(f"{_ARCH}.expert_weights_norm", True),
        u32(f"{_ARCH}.attention.indexer.top_k", whole(hyper.config, "index_topk_blocks")),
        u32(f"{_ARCH}.attention.indexer.block_size", whole(hyper.config, "index_block_size")),
        u32(f"{_ARCH}.attention.indexer.local_blocks", int(hyper.config.get("index_local_blocks") or 0)),
    ]


def _objection(hyper: Hyper) -> str | None:
    config = hyper.config
    kinds = [["full_attention", "minimax_m3_sparse"][_sparse(hyper, layer)] for layer in range(hyper.layers)]
    if config.get("layer_types") != kinds:
        return "config.json: layer_types is not what llama.cpp computes: an index in all layers with experts alone"
    if (heads := whole(config, "index_n_heads")) != hyper.heads_kv:
        return (
            f"config.json: index_n_heads is {heads}, llama.cpp takes one for each of the {hyper.heads_kv} heads of keys"
        )
    if shared_width(hyper) % hyper.expert_inner:
        return f"config.json: shared_intermediate_size is no multiple of the experts' width ({hyper.expert_inner})"
    turned = read_rope(config).dimensions(hyper.head_dim)
    if config.get("rotary_dim") not in (turned, None):
        return f"config.json: rotary_dim is {config['rotary_dim']}, partial_rotary_factor speaks of {turned}"
    return leading.objection(hyper)


FAMILY = Family(
    "minimax_m3", ("minimax_m3_vl_text",), _ARCH, named="dots1", experts=True, ropes=("default",), biases=(),
    norm_offset=1.0, partly=True, head_needed=True, meant=_meant, shapes=_shapes, parts=_parts, keys=_keys,
    objection=_objection,
    layer=lambda hyper, layer: leading.then(
        (*_ATTENTION, *(_INDEX if _sparse(hyper, layer) else ())), GATED, (*EXPERTS, CHOICE, *SHARED_EXPERT)
    )(hyper, layer),
    told=("moe_intermediate_size", "routed_scaling_factor", "index_n_heads", "index_head_dim"),
    only={"swiglu_alpha": (1.702, None), "swiglu_limit": (7, None), "hidden_act": ("silu", "swigluoai", None)},
)  # fmt: skip
