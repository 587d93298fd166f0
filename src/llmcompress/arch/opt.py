"""OPT: learned positions, LayerNorm, ReLU, biases everywhere, head tied to the embedding."""

from llmcompress.arch.spec import ArchSpec, Flow, Linear, Norm, Scores

_BEFORE = ("do_layer_norm_before", True)  # else a norm's output is also added to what it normalises

ARCH = ArchSpec(
    name="opt",
    model_types=("opt",),
    linears=(
        Linear("self_attn.q_proj", reads="attn_in"),
        Linear("self_attn.k_proj", reads="attn_in"),
        Linear("self_attn.v_proj", reads="attn_in"),
        Linear("self_attn.out_proj", reads="attn_out", adds=True),
        Linear("fc1", reads="mlp_in"),
        Linear("fc2", reads="mlp_hidden", adds=True),
    ),
    norms=(
        Norm("self_attn_layer_norm", ("attn_in",), centred=True, when=_BEFORE),
        Norm("final_layer_norm", ("mlp_in",), centred=True, when=_BEFORE),
    ),
    flows=(
        Flow("self_attn.v_proj", "attn_out", heads=True),
        Flow("fc1", "mlp_hidden", when=("activation_function", "relu")),
    ),
    scores=Scores(rotary=False),
    final=Norm("model.decoder.final_layer_norm", ("head",), centred=True, when=_BEFORE),
    positions="model.decoder.embed_positions",
    layers="model.decoder.layers",
    embed="model.decoder.embed_tokens",
    outside=("model.decoder.embed_positions",),
    grouped_queries=False,
    tiny={"num_attention_heads": 4, "ffn_dim": 192, "word_embed_proj_dim": 64},
)
