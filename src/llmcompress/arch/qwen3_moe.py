"""Qwen3 MoE: Qwen3 attention with a mixture of experts in the layers that config.json does not make dense."""

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
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    linears=(
        *attention_and_mlp(),
        Linear("mlp.experts.{e}.gate_proj", reads="expert_in.{e}"),
        Linear("mlp.experts.{e}.up_proj", reads="expert_in.{e}"),
        Linear("mlp.experts.{e}.down_proj", reads="expert_hidden.{e}", adds=True),
    ),
    experts=Experts(path="mlp.experts", count="num_experts"),
    never=(Linear("mlp.gate", reads="mlp_in"),),
    norms=(
        Norm("input_layernorm", ("attn_in",)),
        Norm("post_attention_layernorm", ("mlp_in", "expert_in.{e}")),
    ),
    flows=(*LLAMA_FLOWS, Flow("mlp.experts.{e}.up_proj", "expert_hidden.{e}")),
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
