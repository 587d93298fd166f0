"""Gemma 2 and Gemma 3 (text): four norms per layer, alternating sliding and full attention, soft-capped logits.

Soft-capping of attention scores exists only in the eager implementation.
"""

from llmcompress.arch.spec import LLAMA_FLOWS, RESIDUAL, ArchSpec, Norm, Scores, attention_and_mlp

ARCH = ArchSpec(
    name="gemma",
    model_types=("gemma2", "gemma3_text"),
    linears=attention_and_mlp(),
    norms=(
        Norm("input_layernorm", ("attn_in",), offset=1.0),
        Norm("post_attention_layernorm", (RESIDUAL,), offset=1.0),
        Norm("pre_feedforward_layernorm", ("mlp_in",), offset=1.0),
        Norm("post_feedforward_layernorm", (RESIDUAL,), offset=1.0),
    ),
    flows=LLAMA_FLOWS,
    scores=Scores(norms=("self_attn.q_norm", "self_attn.k_norm"), offset=1.0),
    final=Norm("model.norm", ("head",), offset=1.0),
    attention="eager",
    tiny={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
)
