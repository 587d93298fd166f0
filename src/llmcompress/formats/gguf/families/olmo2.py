"""OLMo 2: norms after attention and feed-forward, and norms of queries and keys over all heads."""

from llmcompress.formats.gguf.family import ATTENTION, GATED, Family

FAMILY = Family(
    name="olmo2",
    model_types=("olmo2",),
    arch="olmo2",
    head_needed=True,
    square=True,
    norm_heads=True,
    layer=(
        *ATTENTION[1:],
        "attn_q_norm",
        "attn_k_norm",
        "post_attention_norm",
        *GATED[1:],
        "post_ffw_norm",
    ),
    defaults={"rms_norm_eps": 1e-5},
    only={"hidden_act": ("silu", None)},
)
