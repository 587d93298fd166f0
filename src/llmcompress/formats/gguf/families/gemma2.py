"""Gemma 2. Its norms multiply by one plus the weight, llama.cpp's by the weight."""

from llmcompress.formats.gguf.families.gemma import objection
from llmcompress.formats.gguf.family import ATTENTION, GATED, Family
from llmcompress.formats.gguf.hyper import Hyper, number, whole
from llmcompress.formats.gguf.keys import Key, f32, u32
from llmcompress.formats.gguf.rope import Rope


def keys(hyper: Hyper, rope: Rope) -> tuple[Key, ...]:
    return (
        f32("gemma2.attn_logit_softcapping", number(hyper.config, "attn_logit_softcapping")),
        f32("gemma2.final_logit_softcapping", number(hyper.config, "final_logit_softcapping")),
        u32("gemma2.attention.sliding_window", whole(hyper.config, "sliding_window")),
    )


FAMILY = Family(
    name="gemma2",
    model_types=("gemma2",),
    arch="gemma2",
    tied=True,
    untied=False,
    ropes=("default",),
    windowed=True,
    layer=(*ATTENTION, "post_attention_norm", *GATED, "post_ffw_norm"),
    norm_offset=1.0,
    defaults={
        "rms_norm_eps": 1e-6,
        "head_dim": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
    only={"hidden_activation": ("gelu_pytorch_tanh", None)},
    objection=lambda hyper: objection(hyper, every=2, wide=46),
    keys=keys,
)
