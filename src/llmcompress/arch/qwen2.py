"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from llmcompress.arch.spec import LLAMA_FINAL, LLAMA_FLOWS, LLAMA_NORMS, ArchSpec, Scores, attention_and_mlp

ARCH = ArchSpec(
    name="qwen2",
    model_types=("qwen2",),
    linears=attention_and_mlp(),
    norms=LLAMA_NORMS,
    flows=LLAMA_FLOWS,
    scores=Scores(),
    final=LLAMA_FINAL,
    tiny={"num_attention_heads": 4, "num_key_value_heads": 2},
)
