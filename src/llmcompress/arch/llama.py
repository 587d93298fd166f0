"""Llama, Mistral and their many relatives (SmolLM2, Yi, ...)."""

from llmcompress.arch.spec import LLAMA_FINAL, LLAMA_FLOWS, LLAMA_NORMS, ArchSpec, Scores, attention_and_mlp

ARCH = ArchSpec(
    name="llama",
    model_types=("llama", "mistral"),
    linears=attention_and_mlp(),
    norms=LLAMA_NORMS,
    flows=LLAMA_FLOWS,
    scores=Scores(),
    final=LLAMA_FINAL,
    tiny={"num_attention_heads": 4, "num_key_value_heads": 2},
)
