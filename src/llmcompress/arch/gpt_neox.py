"""GPT-NeoX and Pythia: attention and MLP in parallel, q, k, v fused, biases."""

from llmcompress.arch.spec import ArchSpec, Linear

ARCH = ArchSpec(
    name="gpt_neox",
    model_types=("gpt_neox",),
    linears=(
        Linear("attention.query_key_value", reads="attn_in"),
        Linear("attention.dense", reads="attn_out"),
        Linear("mlp.dense_h_to_4h", reads="mlp_in"),
        Linear("mlp.dense_4h_to_h", reads="mlp_hidden"),
    ),
    layers="gpt_neox.layers",
    embed="gpt_neox.embed_in",
    outside=("gpt_neox.final_layer_norm",),
    disk={"lm_head": "embed_out"},
    grouped_queries=False,
    tiny={"num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2},
)
