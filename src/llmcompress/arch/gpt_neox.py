"""GPT-NeoX and Pythia: attention and MLP in parallel, q, k, v fused, biases."""

from llmcompress.arch.spec import ArchSpec, Flow, Linear, Norm

ARCH = ArchSpec(
    name="gpt_neox",
    model_types=("gpt_neox",),
    linears=(
        Linear("attention.query_key_value", reads="attn_in"),
        Linear("attention.dense", reads="attn_out", adds=True),
        Linear("mlp.dense_h_to_4h", reads="mlp_in"),
        Linear("mlp.dense_4h_to_h", reads="mlp_hidden", adds=True),
    ),
    norms=(
        Norm("input_layernorm", ("attn_in",), centred=True),
        Norm("post_attention_layernorm", ("mlp_in",), centred=True),
    ),
    flows=(Flow("attention.query_key_value", "attn_out", rows="third of heads", heads=True),),
    final=Norm("gpt_neox.final_layer_norm", ("head",), centred=True),
    layers="gpt_neox.layers",
    embed="gpt_neox.embed_in",
    outside=("gpt_neox.final_layer_norm",),
    disk={"lm_head": "embed_out"},
    grouped_queries=False,
    tiny={"num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2},
)
