"""Mixtral: for llama.cpp a Llama whose layers hold experts."""

from llmcompress.formats.gguf.families import llama
from llmcompress.formats.gguf.family import ATTENTION, EXPERTS, Family

FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    arch="llama",
    factored=True,
    experts=True,
    layer=(*ATTENTION, *EXPERTS),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    only={"hidden_act": ("silu", None)},
    rows=llama.rows,
    keys=llama.keys,
)
