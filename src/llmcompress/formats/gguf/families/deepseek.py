"""DeepSeek V2 and V3 and their kin: latent attention, which llama.cpp computes with one head of keys and values.

The matrix that makes keys and values of the latent is taken apart: that of the keys is transposed, head by head, since
llama.cpp moves it over to the queries.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from llmcompress.formats.gguf.families import leading
from llmcompress.formats.gguf.family import CHOICE, EXPERTS, GATED, SHARED_EXPERT, Family, Kin, Shape
from llmcompress.formats.gguf.hyper import Hyper, number, whole
from llmcompress.formats.gguf.keys import Key, f32, u32
from llmcompress.formats.gguf.rope import Rope
from llmcompress.formats.gguf.tensors import GGUFTensor, stretch

_LATENT = ("attn_norm", "attn_kv_a_mqa", "attn_kv_a_norm", "attn_k_b", "attn_v_b", "attn_output")
_TOLD = ("q_lora_rank", "kv_lora_rank", "n_shared_experts", "routed_scaling_factor", "n_group", "topk_group")
_ONLY = {"hidden_act": ("silu", None), "attention_bias": (False, None), "rope_interleave": (True, None)}


def _sizes(hyper: Hyper) -> tuple[int, int, int, int]:
    """Width of the latent, and values of a head: of queries and keys without and with positions, and of values."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent, plain, turned, values = (whole(hyper.config, name) for name in names)
    return latent, plain, turned, values


def _parts(path: str, shape: Shape, hyper: Hyper) -> Sequence[GGUFTensor] | None:
    if not path.endswith(".kv_b_proj.weight"):
        return None
    latent, plain, _, values = _sizes(hyper)
    heads, both = hyper.heads, plain + values
    if shape != (heads * both, latent):
        return None
    keys, rest = stretch(0, plain, both), stretch(plain, values, both)
    return (
        GGUFTensor("attn_k_b.weight", (heads, latent, plain), rows=keys, split=heads, turned=True),
        GGUFTensor("attn_v_b.weight", (heads, values, latent), rows=rest, split=heads),
    )


def _shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    latent, plain, turned, values = _sizes(hyper)
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


def _queries(hyper: Hyper) -> tuple[str, ...]:
    return ("attn_q_a", "attn_q_a_norm", "attn_q_b") if hyper.config.get("q_lora_rank") else ("attn_q",)


def _layer(chosen: bool, hyper: Hyper, layer: int) -> tuple[str, ...]:
    experts = (*EXPERTS, *((CHOICE,) if chosen else ()), *SHARED_EXPERT)
    return leading.then((*_LATENT, *_queries(hyper)), GATED, experts)(hyper, layer)


def _keys(gating: int, hyper: Hyper, rope: Rope) -> list[Key]:
    latent, plain, turned, values = _sizes(hyper)
    found = [
        leading.key("deepseek2", hyper),
        u32("deepseek2.attention.head_count_kv", 1),
        u32("deepseek2.attention.key_length", latent + turned),
        u32("deepseek2.attention.value_length", latent),
        u32("deepseek2.attention.key_length_mla", plain + turned),
        u32("deepseek2.attention.value_length_mla", values),
        u32("deepseek2.expert_feed_forward_length", hyper.expert_inner),
        u32("deepseek2.expert_gating_func", gating),
        u32("deepseek2.rope.dimension_count", turned),
    ]
    if rope.kind == "yarn" and rope.scaling.get("mscale_all_dim") is not None:
        found.append(f32("deepseek2.rope.scaling.yarn_log_multiplier", 0.1 * number(rope.scaling, "mscale_all_dim")))
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


FAMILY = Kin(
    "deepseek",
    (
        Family(
            "deepseek_v2", ("deepseek_v2",), "deepseek2", experts=True, biases=(),
            ropes=("default", "yarn"), told=_TOLD,
            layer=lambda hyper, layer: _layer(False, hyper, layer), shapes=_shapes, parts=_parts, objection=_greedy,
            keys=lambda hyper, rope: _keys(leading.SOFTMAX, hyper, rope),
            only={**_ONLY, "norm_topk_prob": (False, None)},
        ),
        Family(
            "deepseek_v3", ("deepseek_v3", "glm4_moe_lite"), "deepseek2", experts=True, biases=(),
            ropes=("default", "yarn"), told=(*_TOLD, "norm_topk_prob"), shapes=_shapes, parts=_parts,
            layer=lambda hyper, layer: _layer(True, hyper, layer), objection=_objection,
            keys=lambda hyper, rope: _keys(leading.SIGMOID, hyper, rope), only=_ONLY,
        ),
        Family(
            "youtu", ("youtu",), "deepseek2", tied=True, biases=(), ropes=("default", "yarn"), told=_TOLD,
            shapes=_shapes, parts=_parts, layer=lambda hyper, layer: (*_LATENT, *_queries(hyper), *GATED),
            meant=_all_dense, keys=lambda hyper, rope: _keys(leading.SIGMOID, hyper, rope), objection=_objection,
            only=_ONLY,
        ),
    ),
)  # fmt: skip
