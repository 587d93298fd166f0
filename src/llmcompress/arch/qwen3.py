"""Qwen3: Llama with norms on queries and keys."""

from llmcompress.arch.spec import ArchSpec, attention_and_mlp

ARCH = ArchSpec(
    name="qwen3",
    model_types=("qwen3",),
    linears=attention_and_mlp(),
    tiny={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
)
