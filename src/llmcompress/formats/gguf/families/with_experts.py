"""Families with experts in their layers and nothing else that is special."""

from collections.abc import Sequence

from llmcompress.formats.gguf.families import leading, llama
from llmcompress.formats.gguf.families.layer_patterns import every
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
from llmcompress.formats.gguf.hyper import Hyper, number
from llmcompress.formats.gguf.keys import Key, f32, flag, u32
from llmcompress.formats.gguf.rope import Rope
from llmcompress.formats.gguf.shapes import shared_width
from llmcompress.formats.gguf.tensors import GGUFTensor, stretch

_SILU = {"hidden_act": ("silu", None)}
_NORMS = ("attn_q_norm", "attn_k_norm")
_SCALED = ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group")
_ERNIE = ("moe_intermediate_size", "moe_num_shared_experts", "moe_layer_interval")


def halves(path: str, shape: Shape, hyper: Hyper) -> Sequence[GGUFTensor] | None:
    """Gate and up that are one tensor, gate first: those of experts, and those of a shared expert."""
    if not path.endswith(".input_linear.weight") or shape[-2] % 2:
        return None
    kind, half = ("shexp" if "shared_mlp" in path else "exps"), shape[-2] // 2
    rows = {"gate": stretch(0, half, shape[-2]), "up": stretch(half, half, shape[-2])}
    return [
        GGUFTensor(f"ffn_{leaf}_{kind}.weight", (*shape[:-2], half, shape[-1]), rows=part)
        for leaf, part in rows.items()
    ]


def _dots1(hyper: Hyper, rope: Rope) -> list[Key]:
    return [leading.key("dots1", hyper), u32("dots1.expert_gating_func", leading.SIGMOID)]


def _glm4_moe(hyper: Hyper, rope: Rope) -> list[Key]:
    return [leading.key("glm4moe", hyper), u32("glm4moe.expert_gating_func", leading.SIGMOID)]


def _ernie(hyper: Hyper, rope: Rope) -> list[Key]:
    wide = u32("ernie4_5-moe.expert_shared_feed_forward_length", shared_width(hyper))
    return [leading.key("ernie4_5-moe", hyper), wide]


def _hunyuan(hyper: Hyper, rope: Rope) -> list[Key]:
    return [
        u32("hunyuan-moe.expert_feed_forward_length", hyper.inner),
        u32("hunyuan-moe.expert_shared_feed_forward_length", hyper.inner),
        u32("hunyuan-moe.expert_shared_count", 1),
    ]


def _minimax(hyper: Hyper, rope: Rope) -> list[Key]:
    return [
        u32("minimax-m2.expert_feed_forward_length", hyper.inner),
        u32("minimax-m2.expert_gating_func", leading.SIGMOID),
        u32("minimax-m2.rope.dimension_count", hyper.config.get("rotary_dim") or rope.dimensions(hyper.head_dim)),
    ]


def _exaone(hyper: Hyper, rope: Rope) -> list[Key]:
    return [
        leading.key("exaone-moe", hyper),
        u32("exaone-moe.expert_shared_feed_forward_length", shared_width(hyper)),
        u32("exaone-moe.expert_gating_func", leading.SIGMOID),
    ]


def _exaone_objection(hyper: Hyper) -> str | None:
    if hyper.config.get("sliding_window") is None:
        return "config.json: sliding_window is not there, llama.cpp computes exaone_moe models with one"
    return leading.objection(hyper)


def _afmoe(hyper: Hyper, rope: Rope) -> list[Key]:
    return [
        leading.key("afmoe", hyper),
        u32("afmoe.rope.dimension_count", hyper.head_dim),
        u32("afmoe.expert_shared_count", int(hyper.config.get("num_shared_experts") or 0)),
        flag("afmoe.expert_weights_norm", True),
        f32("afmoe.expert_weights_scale", number(hyper.config, "route_scale")),
    ]


def _afmoe_layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    attention = (*ATTENTION, *_NORMS, "attn_gate", "post_attention_norm", "post_ffw_norm")
    shared = SHARED_EXPERT if hyper.config.get("num_shared_experts") else ()
    return leading.then(attention, GATED, (*EXPERTS, CHOICE, *shared))(hyper, layer)


def _hy_v3(hyper: Hyper, rope: Rope) -> list[Key]:
    return [
        u32("hy_v3.expert_shared_feed_forward_length", shared_width(hyper)),
        flag("hy_v3.expert_weights_norm", True),
        u32("hy_v3.expert_gating_func", leading.SIGMOID),
    ]


def _glm4_moe_layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    attention = (*ATTENTION, *(_NORMS if hyper.config.get("use_qk_norm") else ()), "post_attention_norm")
    return leading.then(attention, GATED[1:], (*EXPERTS[1:], CHOICE, *SHARED_EXPERT))(hyper, layer)


def _granite_layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    return (*ATTENTION, *EXPERTS, *(SHARED_EXPERT if hyper.config.get("shared_intermediate_size") else ()))


FAMILY = Kin(
    "experts",
    (
        Family(
            "olmoe", ("olmoe",), "olmoe", experts=True, grouped=False, head_needed=True, square=True, norm_heads=True,
            biases=(), ropes=("default",), layer=(*ATTENTION, *_NORMS, *EXPERTS),
            only={**_SILU, "norm_topk_prob": (False, None), "clip_qkv": (None,)},
        ),
        Family(
            "qwen2_moe", ("qwen2_moe",), "qwen2moe", experts=True, square=True,
            layer=(*ATTENTION, *EXPERTS, *SHARED_EXPERT, "ffn_gate_inp_shexp"),
            told=("moe_intermediate_size", "shared_expert_intermediate_size"),
            shapes=lambda hyper, layer: {"ffn_gate_inp_shexp": (1, hyper.hidden)},
            only={**_SILU, "norm_topk_prob": (False, None), "decoder_sparse_step": (1, None),
                  "mlp_only_layers": ([], None)},
        ),
        Family(
            "granitemoe", ("granitemoe", "granitemoeshared"), "granitemoe", experts=True, square=True, partly=True,
            biases=(), ropes=("default", "linear", "yarn", "llama3"), rows=llama.rows, values=llama.values,
            layer=_granite_layer, parts=halves, told=(*GRANITE, "shared_intermediate_size"), only=_SILU,
        ),
        Family(
            "dots1", ("dots1",), "dots1", experts=True, grouped=False, ropes=("default",), biases=(),
            layer=leading.then((*ATTENTION, *_NORMS), GATED, (*EXPERTS, CHOICE, *SHARED_EXPERT)), keys=_dots1,
            told=("moe_intermediate_size", "n_shared_experts", *_SCALED), objection=leading.objection, only=_SILU,
        ),
        Family(
            "glm4_moe", ("glm4_moe", "solar_open"), "glm4moe", experts=True, partly=True, ropes=("default",),
            keys=_glm4_moe, layer=_glm4_moe_layer, objection=leading.objection,
            told=("moe_intermediate_size", "n_shared_experts", *_SCALED), only=_SILU,
        ),
        Family(
            "ernie4_5_moe", ("ernie4_5_moe",), "ernie4_5-moe", experts=True, tied=True, ropes=("default",), biases=(),
            layer=leading.then(ATTENTION, GATED, (*EXPERTS, CHOICE, *SHARED_EXPERT)), keys=_ernie, told=_ERNIE,
            objection=leading.objection, only={**_SILU, "moe_layer_interval": (1, None)},
        ),
        Family(
            "hunyuan_v1_moe", ("hunyuan_v1_moe",), "hunyuan-moe", experts=True, ropes=("default",), biases=(),
            layer=(*ATTENTION, *_NORMS, *EXPERTS, *SHARED_EXPERT), keys=_hunyuan, only=_SILU,
        ),
        Family(
            "minimax_m2", ("minimax_m2",), "minimax-m2", experts=True, ropes=("default",), biases=(), norm_heads=True,
            layer=(*ATTENTION, *_NORMS, *EXPERTS, CHOICE), keys=_minimax, head_needed=True, only=_SILU,
        ),
        Family(
            "exaone_moe", ("exaone_moe",), "exaone-moe", experts=True, ropes=("default",), biases=(), windowed=True,
            head_needed=True, layer=leading.then((*ATTENTION, *_NORMS), GATED, (*EXPERTS, CHOICE, *SHARED_EXPERT)),
            told=("moe_intermediate_size", "num_shared_experts", "sliding_window", "layer_types", *_SCALED),
            keys=_exaone, objection=_exaone_objection, skipped=("mtp.",), only=_SILU,
        ),
        Family(
            "afmoe", ("afmoe",), "afmoe", experts=True, ropes=("default",), biases=(), windowed=True,
            layer=_afmoe_layer, shapes=lambda hyper, layer: {"attn_gate": (hyper.heads * hyper.head_dim, hyper.hidden)},
            told=("moe_intermediate_size", "sliding_window"), keys=_afmoe, objection=every(4),
            only={**_SILU, "mup_enabled": (True,), "route_norm": (True, None)},
        ),
        Family(
            "hy_v3", ("hy_v3",), "hy_v3", named="step35", experts=True, ropes=("default",), biases=(), keys=_hy_v3,
            layer=leading.then((*ATTENTION, *_NORMS), GATED, (*EXPERTS, "exp_probs_b", *SHARED_EXPERT)),
            shapes=lambda hyper, layer: {"exp_probs_b": (hyper.experts,)},
            parts=renamed({".mlp.expert_bias": "exp_probs_b"}), told=("moe_intermediate_size", "router_scaling_factor"),
            objection=leading.objection, only={**_SILU, "route_norm": (True, None)},
        ),
    ),
)  # fmt: skip
