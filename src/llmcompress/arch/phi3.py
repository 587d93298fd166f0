"""Phi-3 and Phi-4: one fused matrix for q, k, v and one for gate, up."""

from llmcompress.arch.spec import LLAMA_FINAL, LLAMA_NORMS, ArchSpec, Flow, Linear, Scores

ARCH = ArchSpec(
    name="phi3",
    model_types=("phi3",),
    linears=(
        Linear("self_attn.qkv_proj", reads="attn_in"),
        Linear("self_attn.o_proj", reads="attn_out", adds=True),
        Linear("mlp.gate_up_proj", reads="mlp_in"),
        Linear("mlp.down_proj", reads="mlp_hidden", adds=True),
    ),
    norms=LLAMA_NORMS,
    flows=(
        Flow("self_attn.qkv_proj", "attn_out", rows="last", heads=True),
        Flow("mlp.gate_up_proj", "mlp_hidden", rows="last"),
    ),
    scores=Scores("self_attn.qkv_proj", "self_attn.qkv_proj"),
    final=LLAMA_FINAL,
    tiny={"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
)
