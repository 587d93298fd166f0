"""Mixtral: a mixture of experts in every layer; on disk the experts are w1 (gate), w3 (up) and w2 (down)."""

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
    name="mixtral",
    model_types=("mixtral",),
    linears=(*attention_and_mlp()[:4], *EXPERT_LINEARS),
    experts=Experts(("mlp.experts",), count="num_local_experts"),
    disk={
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.experts.{e}.gate_proj": "block_sparse_moe.experts.{e}.w1",
        "mlp.experts.{e}.up_proj": "block_sparse_moe.experts.{e}.w3",
        "mlp.experts.{e}.down_proj": "block_sparse_moe.experts.{e}.w2",
    },
    never=(ROUTER,),
    norms=EXPERT_NORMS,
    flows=(LLAMA_FLOWS[0], EXPERT_FLOW),
    scores=Scores(),
    final=LLAMA_FINAL,
    tiny={"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
)
