"""OLMo 2: norms stand after attention and MLP, so both read the residual stream itself."""

from llmcompress.arch.spec import LLAMA_FINAL, LLAMA_FLOWS, RESIDUAL, ArchSpec, Norm, Scores, attention_and_mlp

ARCH = ArchSpec(
    name="olmo2",
    model_types=("olmo2",),
    linears=attention_and_mlp(),
    norms=(Norm("post_attention_layernorm", (RESIDUAL,)), Norm("post_feedforward_layernorm", (RESIDUAL,))),
    flows=LLAMA_FLOWS,
    scores=Scores(norms=("self_attn.q_norm", "self_attn.k_norm")),
    final=LLAMA_FINAL,
    tiny={"num_attention_heads": 4, "num_key_value_heads": 2},
)
