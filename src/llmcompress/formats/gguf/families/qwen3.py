"""Qwen3."""

from llmcompress.formats.gguf.family import ATTENTION, GATED, Family

FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    arch="qwen3",
    factored=True,
    layer=(*ATTENTION, "attn_q_norm", "attn_k_norm", *GATED),
    defaults={"rms_norm_eps": 1e-6, "head_dim": 128},
    only={"hidden_act": ("silu", None)},
)
