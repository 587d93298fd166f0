"""Mixtral: a mixture of experts in every layer; on disk the experts are w1 (gate), w3 (up) and w2 (down)."""

from llmcompress.arch.spec import (
    LLAMA_FINAL,
    LLAMA_FLOWS,
    ArchSpec,
    Experts,
    Flow,
    Linear,
    Norm,
    Scores,
    attention_and_mlp,
)

ARCH = ArchSpec(
    name="mixtral",
    model_types=("mixtral",),
    linears=(
        *attention_and_mlp()[:4],
        Linear("mlp.experts.{e}.gate_proj", reads="expert_in.{e}"),
        Linear("mlp.experts.{e}.up_proj", reads="expert_in.{e}"),
        Linear("mlp.experts.{e}.down_proj", reads="expert_hidden.{e}", adds=True),
    ),
    experts=Experts(path="mlp.experts", count="num_local_experts"),
    disk={
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.experts.{e}.gate_proj": "block_sparse_moe.experts.{e}.w1",
        "mlp.experts.{e}.up_proj": "block_sparse_moe.experts.{e}.w3",
        "mlp.experts.{e}.down_proj": "block_sparse_moe.experts.{e}.w2",
    },
    never=(Linear("mlp.gate", reads="mlp_in"),),
    norms=(
        Norm("input_layernorm", ("attn_in",)),
        Norm("post_attention_layernorm", ("mlp_in", "expert_in.{e}")),
    ),
    flows=(LLAMA_FLOWS[0], Flow("mlp.experts.{e}.up_proj", "expert_hidden.{e}")),
    scores=Scores(),
    final=LLAMA_FINAL,
    tiny={"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
)
