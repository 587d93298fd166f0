"""OPT: learned positions, LayerNorm, ReLU, biases everywhere, head tied to the embedding."""

from llmcompress.arch.spec import ArchSpec, Linear

ARCH = ArchSpec(
    name="opt",
    model_types=("opt",),
    linears=(
        Linear("self_attn.q_proj", reads="attn_in"),
        Linear("self_attn.k_proj", reads="attn_in"),
        Linear("self_attn.v_proj", reads="attn_in"),
        Linear("self_attn.out_proj", reads="attn_out"),
        Linear("fc1", reads="mlp_in"),
        Linear("fc2", reads="mlp_hidden"),
    ),
    layers="model.decoder.layers",
    embed="model.decoder.embed_tokens",
    outside=("model.decoder.embed_positions",),
    grouped_queries=False,
    tiny={"num_attention_heads": 4, "ffn_dim": 192, "word_embed_proj_dim": 64},
)
