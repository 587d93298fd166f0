"""Bamba: layers of Mamba 2 and of attention, which llama.cpp computes as Granite's hybrids, here with positions."""

from llmcompress.formats.gguf.families.state_space import MAMBA2, SCAN2, pairs, scan, shapes2
from llmcompress.formats.gguf.family import ATTENTION, GATED, Family
from llmcompress.formats.gguf.hyper import Hyper
from llmcompress.formats.gguf.keys import Key, flag
from llmcompress.formats.gguf.rope import Rope, read_rope
from llmcompress.formats.gguf.tensors import Strips


def _attends(hyper: Hyper) -> list[bool]:
    return [layer in (hyper.config.get("attn_layer_indices") or ()) for layer in range(hyper.layers)]


def _rows(role: str, hyper: Hyper) -> Strips | None:
    """Rotary pairs next to each other in the first values of a head; the others are not rotated and stay."""
    heads = {"attn_q": hyper.heads, "attn_k": hyper.heads_kv}.get(role)
    if heads is None:
        return None
    one = hyper.head_dim
    turned = read_rope(hyper.config).dimensions(one)
    half, rest = turned // 2, ((turned, one - turned, 0, 1),) if turned < one else ()
    of_head = (*((pair, 1, half, 2) for pair in range(half)), *rest)
    return Strips(tuple((head * one + first, *run) for head in range(heads) for first, *run in of_head))


def _keys(hyper: Hyper, rope: Rope) -> list[Key]:
    arch = "granitehybrid"
    rotated = flag(f"{arch}.rope.scaling.finetuned", True)
    return [pairs(arch, hyper, _attends(hyper)), rotated, *scan(hyper).keys(arch, True)]


def _layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    return (*(ATTENTION if _attends(hyper)[layer] else ("attn_norm", *SCAN2)), *GATED)


FAMILY = Family(
    name="bamba",
    model_types=("bamba",),
    arch="granitehybrid",
    square=True,
    ropes=("default",),
    partly=True,
    layer=_layer,
    biased=("ssm_conv1d",),
    biases=(),
    forms={"ssm_a": "decay"},
    reshaped=MAMBA2,
    shapes=shapes2,
    rows=_rows,
    keys=_keys,
    defaults={"partial_rotary_factor": 0.5},
    only={
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "mamba_proj_bias": (False, None),
    },
)
