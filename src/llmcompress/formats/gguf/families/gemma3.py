"""Gemma 3, text only. Its embedding has rows that no token has; sliding attention has a rotary base of its own."""

from llmcompress.formats.gguf.families.gemma import objection
from llmcompress.formats.gguf.family import ATTENTION, GATED, Family
from llmcompress.formats.gguf.hyper import Hyper, number, whole
from llmcompress.formats.gguf.keys import Key, f32, u32
from llmcompress.formats.gguf.rope import Rope


def keys(hyper: Hyper, rope: Rope) -> tuple[Key, ...]:
    found = [u32("gemma3.attention.sliding_window", whole(hyper.config, "sliding_window"))]
    if rope.local_theta is not None:
        found.append(f32("gemma3.rope.freq_base_swa", rope.local_theta))
    if hyper.config.get("final_logit_softcapping") is not None:
        found.append(f32("gemma3.final_logit_softcapping", number(hyper.config, "final_logit_softcapping")))
    return tuple(found)


FAMILY = Family(
    name="gemma3",
    model_types=("gemma3_text",),
    arch="gemma3",
    tied=True,
    ropes=("default", "linear"),
    windowed=True,
    layer=(*ATTENTION, "attn_q_norm", "attn_k_norm", "post_attention_norm", *GATED, "post_ffw_norm"),
    norm_offset=1.0,
    cut_vocabulary=True,
    defaults={
        "rms_norm_eps": 1e-6,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    only={
        "hidden_activation": ("gelu_pytorch_tanh", None),
        "attn_logit_softcapping": (None,),
        "sliding_window_pattern": (6, None),
        "use_bidirectional_attention": (False, None),
    },
    objection=lambda hyper: objection(hyper, every=6, wide=62),
    keys=keys,
)
