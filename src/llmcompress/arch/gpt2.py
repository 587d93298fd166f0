"""GPT-2: matrices stored [in, out] (Conv1D), q, k, v fused, head tied to the embedding."""

from llmcompress.arch.spec import ArchSpec, Flow, Linear, Norm

ARCH = ArchSpec(
    name="gpt2",
    model_types=("gpt2",),
    linears=(
        Linear("attn.c_attn", reads="attn_in", conv1d=True),
        Linear("attn.c_proj", reads="attn_out", conv1d=True, adds=True),
        Linear("mlp.c_fc", reads="mlp_in", conv1d=True),
        Linear("mlp.c_proj", reads="mlp_hidden", conv1d=True, adds=True),
    ),
    norms=(Norm("ln_1", ("attn_in",), centred=True), Norm("ln_2", ("mlp_in",), centred=True)),
    flows=(Flow("attn.c_attn", "attn_out", rows="last", heads=True),),
    final=Norm("transformer.ln_f", ("head",), centred=True),
    positions="transformer.wpe",
    layers="transformer.h",
    embed="transformer.wte",
    outside=("transformer.wpe", "transformer.ln_f"),
    grouped_queries=False,
    tiny={"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 1, "eos_token_id": 2},
)
