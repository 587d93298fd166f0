"""Llama, Mistral and their relatives. llama.cpp rotates neighbouring values, so rows of q and k change their order."""

from collections.abc import Mapping
from dataclasses import replace

from llmcompress.formats.gguf.family import Family, Kin
from llmcompress.formats.gguf.hyper import Hyper
from llmcompress.formats.gguf.keys import Key, u32
from llmcompress.formats.gguf.rope import Rope, llama3_factors
from llmcompress.formats.gguf.tensors import Rows, rotary_pairs


def rows(role: str, hyper: Hyper) -> Rows | None:
    heads = {"attn_q": hyper.heads, "attn_k": hyper.heads_kv}.get(role)
    return None if heads is None else rotary_pairs(heads, hyper.head_dim)


def values(hyper: Hyper, rope: Rope) -> Mapping[str, tuple[float, ...]]:
    return {"rope_freqs.weight": llama3_factors(rope, hyper.head_dim)} if rope.kind == "llama3" else {}


def keys(hyper: Hyper, rope: Rope) -> tuple[Key, ...]:
    return (u32("llama.rope.dimension_count", hyper.head_dim),)


_LLAMA = Family(
    name="llama",
    model_types=("llama", "mistral", "iquestcoder"),
    arch="llama",
    factored=True,
    ropes=("default", "linear", "yarn", "llama3"),
    biases=("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    defaults={"rms_norm_eps": 1e-6},
    only={"hidden_act": ("silu", None)},
    rows=rows,
    values=values,
    keys=keys,
)
# dynamic scaling begins where the context ends
_INTERNLM3 = replace(_LLAMA, name="internlm3", model_types=("internlm3",), ropes=("default", "dynamic"))
FAMILY = Kin("llama", (_LLAMA, _INTERNLM3))
