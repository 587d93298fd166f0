"""GPT-2: learned positions, matrices stored [in, out], biases everywhere."""

from llmcompress.formats.gguf.family import Family

LAYER = ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down")
FAMILY = Family(
    name="gpt2",
    model_types=("gpt2",),
    arch="gpt2",
    base="transformer.",
    tied=True,
    grouped=False,
    rotary=False,
    square=True,
    transposed=("c_attn", "c_proj", "c_fc"),
    rms=False,
    layer=LAYER,
    biased=("output_norm", *LAYER),
    outer=("position_embd",),
    biases=(),
    defaults={"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"},
    only={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True, None),
        "scale_attn_by_inverse_layer_idx": (False, None),
        "add_cross_attention": (False, None),
    },
)
