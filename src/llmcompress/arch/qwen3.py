"""Qwen3: Llama with norms on queries and keys."""

from llmcompress.arch.spec import LLAMA_FINAL, LLAMA_FLOWS, LLAMA_NORMS, ArchSpec, Scores, attention_and_mlp

ARCH = ArchSpec(
    name="qwen3",
    model_types=("qwen3",),
    linears=attention_and_mlp(),
    norms=LLAMA_NORMS,
    flows=LLAMA_FLOWS,
    scores=Scores(norms=("self_attn.q_norm", "self_attn.k_norm")),
    final=LLAMA_FINAL,
    tiny={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
)
