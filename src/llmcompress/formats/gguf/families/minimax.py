"""MiniMax-Text-01 and M1: lightning attention in most layers; what enters a block is carried on after its norm."""

from collections.abc import Mapping, Sequence

from llmcompress.formats.gguf.family import ATTENTION, EXPERTS, Family, Shape, renamed
from llmcompress.formats.gguf.hyper import Hyper, number, whole
from llmcompress.formats.gguf.keys import Key, f32, flags, u32
from llmcompress.formats.gguf.rope import Rope
from llmcompress.formats.gguf.tensors import GGUFTensor

_ARCH = "minimax-01"
_LIGHTNING = ("attn_norm", "attn_qkv", "attn_gate", "attn_norm_2", "attn_output")
_NAMES = {
    ".self_attn.qkv_proj.weight": "attn_qkv.weight",
    ".self_attn.output_gate.weight": "attn_gate.weight",
    ".self_attn.norm.weight": "attn_norm_2.weight",
    ".self_attn.out_proj.weight": "attn_output.weight",
}
_TABLES = (".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay")
"""How fast heads forget, which llama.cpp computes by the same formula."""
_SHARES = ("full_attn_alpha_factor", "linear_attn_alpha_factor", "mlp_alpha_factor")


def _linear(hyper: Hyper) -> list[bool]:
    """Of each layer, whether its attention is linear; every second one is where config.json does not say it."""
    kinds = hyper.config.get("layer_types")
    if isinstance(kinds, list):
        return [kind == "linear_attention" for kind in kinds]
    return [layer % 2 == 1 for layer in range(hyper.layers)]


def _layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    return (*(_LIGHTNING if _linear(hyper)[layer] else ATTENTION), *EXPERTS)


def _shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    wide = hyper.heads * hyper.head_dim
    return {"attn_qkv": (3 * wide, hyper.hidden), "attn_gate": (wide, hyper.hidden), "attn_norm_2": (wide,)}


def _parts(path: str, shape: Shape, hyper: Hyper) -> Sequence[GGUFTensor] | None:
    return () if path.endswith(_TABLES) else renamed(_NAMES)(path, shape, hyper)


def _keys(hyper: Hyper, rope: Rope) -> list[Key]:
    turned = {"rotary_dim": hyper.config.get("rotary_dim") or hyper.head_dim}
    return [
        flags(f"{_ARCH}.attention.recurrent_layers", _linear(hyper)),
        f32(f"{_ARCH}.residual_scale", number(hyper.config, _SHARES[0])),
        u32(f"{_ARCH}.rope.dimension_count", whole(turned, "rotary_dim")),
    ]


def _objection(hyper: Hyper) -> str | None:
    if len(_linear(hyper)) != hyper.layers:
        return f"config.json: layer_types does not tell of {hyper.layers} layers"
    if len(shares := {number(hyper.config, name) for name in _SHARES}) > 1:
        return f"config.json: {', '.join(_SHARES)} are {sorted(shares)}, llama.cpp knows one of all"
    return None


FAMILY = Family(
    "minimax", ("minimax",), _ARCH, named="minimax-m2", experts=True, ropes=("default",), biases=(),
    layer=_layer, shapes=_shapes, parts=_parts, keys=_keys, objection=_objection,
    defaults=dict.fromkeys(_SHARES, 1.0),
    only={
        "hidden_act": ("silu", None), "full_attn_beta_factor": (1, None), "linear_attn_beta_factor": (1, None),
        "mlp_beta_factor": (1, None),
    },
)  # fmt: skip
