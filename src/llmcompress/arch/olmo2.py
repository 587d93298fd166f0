"""OLMo 2: norms stand after attention and MLP, so both read the residual stream itself."""

from llmcompress.arch.spec import ArchSpec, attention_and_mlp

ARCH = ArchSpec(
    name="olmo2",
    model_types=("olmo2",),
    linears=attention_and_mlp(),
    tiny={"num_attention_heads": 4, "num_key_value_heads": 2},
)
