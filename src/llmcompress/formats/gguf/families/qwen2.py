"""Qwen2 and Qwen2.5."""

from llmcompress.formats.gguf.family import Family

FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    arch="qwen2",
    square=True,
    defaults={"rms_norm_eps": 1e-6},
    only={"hidden_act": ("silu", None)},
)
