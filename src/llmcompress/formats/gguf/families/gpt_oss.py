"""GPT-OSS: experts stored [in, out] with the rows of gate and up in turn, biases everywhere, sinks of attention."""

from collections.abc import Sequence

from llmcompress.formats.gguf.families.layer_patterns import every
from llmcompress.formats.gguf.family import ATTENTION, EXPERTS, Family, Shape
from llmcompress.formats.gguf.hyper import Hyper
from llmcompress.formats.gguf.keys import Key, u32
from llmcompress.formats.gguf.rope import Rope
from llmcompress.formats.gguf.tensors import GGUFTensor, Rows

_EXPERTS = EXPERTS[1:]


def parts(path: str, shape: Shape, hyper: Hyper) -> Sequence[GGUFTensor] | None:
    leaf = path.rpartition(".")[2]
    if leaf == "down_proj":
        return (GGUFTensor("ffn_down_exps.weight", (shape[0], shape[2], shape[1]), transposed=True),)
    if leaf == "down_proj_bias":
        return (GGUFTensor("ffn_down_exps.bias", shape),)
    if leaf not in ("gate_up_proj", "gate_up_proj_bias") or shape[-1] % 2:
        return None
    half, biased = shape[-1] // 2, leaf.endswith("_bias")
    turns = {"gate": Rows((half, 2), (1, 0), 0, half), "up": Rows((half, 2), (1, 0), half, half)}
    if biased:
        return [
            GGUFTensor(f"ffn_{name}_exps.bias", (shape[0], half), transposed=True, rows=rows, turned=True)
            for name, rows in turns.items()
        ]
    return [
        GGUFTensor(f"ffn_{name}_exps.weight", (shape[0], half, shape[1]), transposed=True, rows=rows)
        for name, rows in turns.items()
    ]


def keys(hyper: Hyper, rope: Rope) -> list[Key]:
    return [u32("gpt-oss.expert_feed_forward_length", hyper.inner)]


FAMILY = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    arch="gpt-oss",
    experts=True,
    head_needed=True,
    ropes=("default", "yarn"),
    windowed=True,
    layer=(*ATTENTION, "attn_sinks", "post_attention_norm", *_EXPERTS),
    biased=(*ATTENTION[1:], *_EXPERTS),
    biases=(),
    shapes=lambda hyper, layer: {"attn_sinks": (hyper.heads,)},
    parts=parts,
    told=("sliding_window",),
    keys=keys,
    objection=every(2),
    only={"hidden_act": ("silu", None)},
)
