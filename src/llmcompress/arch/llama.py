"""Llama, Mistral and their many relatives (SmolLM2, Yi, ...)."""

from llmcompress.arch.spec import ArchSpec, attention_and_mlp

ARCH = ArchSpec(
    name="llama",
    model_types=("llama", "mistral"),
    linears=attention_and_mlp(),
    tiny={"num_attention_heads": 4, "num_key_value_heads": 2},
)
