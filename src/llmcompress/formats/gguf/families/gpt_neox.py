"""GPT-NeoX and Pythia: q, k, v of each head in turn in one matrix, biases everywhere, a head of its own."""

from llmcompress.formats.gguf.family import Family
from llmcompress.formats.gguf.hyper import Hyper
from llmcompress.formats.gguf.keys import Key, flag, u32
from llmcompress.formats.gguf.rope import Rope
from llmcompress.formats.gguf.tensors import Rows, parted

LAYER = ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down")


def rows(role: str, hyper: Hyper) -> Rows | None:
    return parted(hyper.heads, hyper.head_dim) if role == "attn_qkv" else None


def keys(hyper: Hyper, rope: Rope) -> tuple[Key, ...]:
    return (
        u32("gptneox.rope.dimension_count", rope.dimensions(hyper.head_dim)),
        flag("gptneox.use_parallel_residual", hyper.config["use_parallel_residual"]),
    )


FAMILY = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    arch="gptneox",
    base="gpt_neox.",
    head="embed_out",
    head_needed=True,
    grouped=False,
    square=True,
    rms=False,
    layer=LAYER,
    biased=("output_norm", *LAYER),
    biases=(),
    defaults={"layer_norm_eps": 1e-5, "rotary_pct": 0.25, "use_parallel_residual": True},
    only={
        "hidden_act": ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", None),
        "attention_bias": (True, None),
        "use_parallel_residual": (True, False),
    },
    rows=rows,
    keys=keys,
)
