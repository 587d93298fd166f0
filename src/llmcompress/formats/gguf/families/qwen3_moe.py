"""Qwen3 MoE. llama.cpp has experts in every layer and makes the weights of the chosen ones sum to one."""

from llmcompress.formats.gguf.family import ATTENTION, EXPERTS, Family
from llmcompress.formats.gguf.hyper import Hyper
from llmcompress.formats.gguf.keys import Key, u32
from llmcompress.formats.gguf.rope import Rope


def keys(hyper: Hyper, rope: Rope) -> tuple[Key, ...]:
    return (u32("qwen3moe.expert_feed_forward_length", hyper.expert_inner),)


FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    arch="qwen3moe",
    factored=True,
    experts=True,
    layer=(*ATTENTION, "attn_q_norm", "attn_k_norm", *EXPERTS),
    defaults={"rms_norm_eps": 1e-6, "moe_intermediate_size": 768, "norm_topk_prob": False},
    only={
        "hidden_act": ("silu", None),
        "norm_topk_prob": (True,),
        "decoder_sparse_step": (1, None),
        "mlp_only_layers": ([], None),
    },
    keys=keys,
)
