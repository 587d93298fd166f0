"""Qwen3 MoE: Qwen3 attention with a mixture of experts in the layers that config.json does not make dense."""

from llmcompress.arch.spec import (
    EXPERT_FLOW,
    EXPERT_LINEARS,
    EXPERT_NORMS,
    LLAMA_FINAL,
    LLAMA_FLOWS,
    ROUTER,
    ArchSpec,
    Experts,
    Scores,
    attention_and_mlp,
)

ARCH = ArchSpec(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    linears=(*attention_and_mlp(), *EXPERT_LINEARS),
    experts=Experts(("mlp.experts",), count="num_experts"),
    never=(ROUTER,),
    norms=EXPERT_NORMS,
    flows=(*LLAMA_FLOWS, EXPERT_FLOW),
    scores=Scores(norms=("self_attn.q_norm", "self_attn.k_norm")),
    final=LLAMA_FINAL,
    tiny={
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
)
