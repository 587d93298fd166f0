"""DeepSeek V2 and V3 and their kin: latent attention, which llama.cpp computes with one head of keys and values.

The matrix that makes keys and values of the latent is taken apart: that of the keys is transposed, head by head, since
llama.cpp moves it over to the queries.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from llmcompress.formats.gguf.families import leading
from llmcompress.formats.gguf.family import CHOICE, EXPERTS, GATED, SHARED_EXPERT, Family, Kin, Shape
from llmcompress.formats.gguf.hyper import Hyper, number, whole
from llmcompress.formats.gguf.keys import Key, f32, flags, u32
from llmcompress.formats.gguf.rope import Rope
from llmcompress.formats.gguf.tensors import GGUFTensor, stretch

_LATENT = ("attn_norm", "attn_kv_a_mqa", "attn_kv_a_norm", "attn_k_b", "attn_v_b", "attn_output")
_TOLD = ("q_lora_rank", "kv_lora_rank", "n_shared_experts", "routed_scaling_factor", "n_group", "topk_group")
_INDEX = ("indexer.k_norm", "indexer.proj", "indexer.attn_k", "indexer.attn_q_b")
_INDEXED = (*_TOLD, "norm_topk_prob", "index_n_heads", "index_head_dim", "index_topk")
_ONLY = {"hidden_act": ("silu", None), "attention_bias": (False, None), "rope_interleave": (True, None)}


def latent_sizes(hyper: Hyper) -> tuple[int, int, int, int]:
    """Width of the latent, and values of a head: of queries and keys without and with positions, and of values."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent, plain, turned, values = (whole(hyper.config, name) for name in names)
    return latent, plain, turned, values


def latent_parts(path: str, shape: Shape, hyper: Hyper) -> Sequence[GGUFTensor] | None:
    """The matrix that makes keys and values of the latent, taken apart; None for any other."""
    if not path.endswith(".kv_b_proj.weight"):
        return None
    latent, plain, _, values = latent_sizes(hyper)
    heads, both = hyper.heads, plain + values
    if shape != (heads * both, latent):
        return None
    keys, rest = stretch(0, plain, both), stretch(plain, values, both)
    return (
        GGUFTensor("attn_k_b.weight", (heads, latent, plain), rows=keys, split=heads, turned=True),
        GGUFTensor("attn_v_b.weight", (heads, values, latent), rows=rest, split=heads),
    )


def latent_shapes(hyper: Hyper) -> dict[str, Shape]:
    """Shapes of latent attention."""
    latent, plain, turned, values = latent_sizes(hyper)
    ranked = hyper.config.get("q_lora_rank")
    queries = hyper.heads * (plain + turned)
    found: dict[str, Shape] = {
        "attn_kv_a_mqa": (latent + turned, hyper.hidden),
        "attn_kv_a_norm": (latent,),
        "attn_k_b": (hyper.heads, latent, plain),
        "attn_v_b": (hyper.heads, values, latent),
        "attn_output": (hyper.hidden, hyper.heads * values),
        "attn_q": (queries, hyper.hidden),
    }
    if ranked:
        found |= {"attn_q_a": (ranked, hyper.hidden), "attn_q_a_norm": (ranked,), "attn_q_b": (queries, ranked)}
    return found


def _shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    return latent_shapes(hyper)


def _queries(hyper: Hyper) -> tuple[str, ...]:
    return ("attn_q_a", "attn_q_a_norm", "attn_q_b") if hyper.config.get("q_lora_rank") else ("attn_q",)


def _layer(chosen: bool, hyper: Hyper, layer: int) -> tuple[str, ...]:
    experts = (*EXPERTS, *((CHOICE,) if chosen else ()), *SHARED_EXPERT)
    return leading.then((*_LATENT, *_queries(hyper)), GATED, experts)(hyper, layer)


def _keys(arch: str, gating: int, hyper: Hyper, rope: Rope) -> list[Key]:
    latent, plain, turned, values = latent_sizes(hyper)
    found = [
        leading.key(arch, hyper),
        u32(f"{arch}.attention.head_count_kv", 1),
        u32(f"{arch}.attention.key_length", latent + turned),
        u32(f"{arch}.attention.value_length", latent),
        u32(f"{arch}.attention.key_length_mla", plain + turned),
        u32(f"{arch}.attention.value_length_mla", values),
        u32(f"{arch}.expert_feed_forward_length", hyper.expert_inner),
        u32(f"{arch}.expert_gating_func", gating),
        u32(f"{arch}.rope.dimension_count", turned),
    ]
    if rope.kind == "yarn" and rope.scaling.get("mscale_all_dim") is not None:
        found.append(f32(f"{arch}.rope.scaling.yarn_log_multiplier", 0.1 * number(rope.scaling, "mscale_all_dim")))
    return found


def _objection(hyper: Hyper) -> str | None:
    few = bool(hyper.config.get("q_lora_rank")) is (hyper.layers in (26, 27))
    if few:
        return f"config.json: llama.cpp tells by {hyper.layers} layers whether queries have a latent (q_lora_rank)"
    return leading.objection(hyper)


def _all_dense(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every layer is one before the first with experts."""
    return {**config, "first_k_dense_replace": config.get("num_hidden_layers"), "n_shared_experts": 0}


def _greedy(hyper: Hyper) -> str | None:
    if (hyper.config.get("n_group") or 1) > 1 and hyper.config.get("topk_method") != "greedy":
        return "config.json: n_group is above 1, and llama.cpp ranks groups of experts by two scores, not by one"
    return _objection(hyper)


def _indexed(hyper: Hyper) -> list[bool]:
    """Which layers choose keys by an index of their own; the others take the choice of one before."""
    kinds = hyper.config.get("indexer_types") or ["full"] * hyper.layers
    return [kind == "full" for kind in kinds]


def _indexed_layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    return (*_layer(True, hyper, layer), *(_INDEX if _indexed(hyper)[layer] else ()))


def _indexed_shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    heads, one, ranked = (whole(hyper.config, name) for name in ("index_n_heads", "index_head_dim", "q_lora_rank"))
    return {
        **_shapes(hyper, layer),
        "indexer.k_norm": (one,),
        "indexer.proj": (heads, hyper.hidden),
        "indexer.attn_k": (one, hyper.hidden),
        "indexer.attn_q_b": (heads * one, ranked),
    }


def _glm_dsa_keys(hyper: Hyper, rope: Rope) -> list[Key]:
    kinds = flags("glm-dsa.attention.indexer.types", _indexed(hyper))
    return [*_keys("glm-dsa", leading.SIGMOID, hyper, rope), *([kinds] if hyper.config.get("indexer_types") else [])]


def _indexed_objection(hyper: Hyper) -> str | None:
    if (one := whole(hyper.config, "index_head_dim")) % 64:
        return f"config.json: index_head_dim is {one}, llama.cpp rotates index keys by 64 values"
    if len(_indexed(hyper)) != hyper.layers:
        return f"config.json: indexer_types does not tell of {hyper.layers} layers"
    return leading.objection(hyper)


FAMILY = Kin(
    "deepseek",
    (
        Family(
            "deepseek_v2", ("deepseek_v2",), "deepseek2", experts=True, biases=(),
            ropes=("default", "yarn"), told=_TOLD,
            layer=lambda hyper, layer: _layer(False, hyper, layer), shapes=_shapes, parts=latent_parts,
            objection=_greedy,
            keys=lambda hyper, rope: _keys("deepseek2", leading.SOFTMAX, hyper, rope),
            only={**_ONLY, "norm_topk_prob": (False, None)},
        ),
        Family(
            "deepseek_v3", ("deepseek_v3", "glm4_moe_lite"), "deepseek2", experts=True, biases=(),
            ropes=("default", "yarn"), told=(*_TOLD, "norm_topk_prob"), shapes=_shapes, parts=latent_parts,
            layer=lambda hyper, layer: _layer(True, hyper, layer), objection=_objection,
            keys=lambda hyper, rope: _keys("deepseek2", leading.SIGMOID, hyper, rope), only=_ONLY,
        ),
        Family(
            "youtu", ("youtu",), "deepseek2", tied=True, biases=(), ropes=("default", "yarn"), told=_TOLD,
            shapes=_shapes, parts=latent_parts, layer=lambda hyper, layer: (*_LATENT, *_queries(hyper), *GATED),
            meant=_all_dense, keys=lambda hyper, rope: _keys("deepseek2", leading.SIGMOID, hyper, rope),
            objection=_objection, only=_ONLY,
        ),
        Family(
            "deepseek_v32", ("deepseek_v32",), "deepseek32", named="glm-dsa", experts=True,
            biased=("indexer.k_norm",), biases=(), ropes=("default", "yarn"), told=_INDEXED, layer=_indexed_layer,
            shapes=_indexed_shapes, parts=latent_parts, objection=_indexed_objection,
            keys=lambda hyper, rope: _keys("deepseek32", leading.SIGMOID, hyper, rope), only=_ONLY,
        ),
        Family(
            "glm_moe_dsa", ("glm_moe_dsa",), "glm-dsa", experts=True, biased=("indexer.k_norm",), biases=(),
            ropes=("default",), told=_INDEXED, layer=_indexed_layer, shapes=_indexed_shapes, parts=latent_parts,
            objection=_indexed_objection, keys=_glm_dsa_keys, only=_ONLY,
        ),
    ),
)  # fmt: skip
