"""Which type each tensor of a GGUF file has, for a named mixture: the choices that llama.cpp's quantizer makes.

A mixture such as Q4_K_M gives most matrices its default type and the more sensitive ones a better type, by their role
and by how deep they lie. Names are GGUF names, shapes torch's: [out, in], [experts, out, in], [n].
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from llmcompress.errors import PlanError
from llmcompress.formats.gguf.rules import (
    ATTENTION_OUTPUT,
    ATTENTION_OUTPUT_OF_8_EXPERTS,
    DOWN,
    LOW,
    QUERY,
    UP,
    VALUE,
    Facts,
    Place,
    Rules,
    role_of,
)
from llmcompress.formats.gguf.types import FileType, TensorType, tensor_type

Shaped = tuple[str, Sequence[int]]
"""A tensor's name and shape."""

_LAYER = re.compile(r"blk\.(\d+)\.")
_NEVER = (
    "_norm.weight", "ffn_gate_inp.weight", "position_embd.weight", "token_types.weight", "ssm_conv1d",
    "shortconv.conv.weight", "altup", "laurel", "per_layer_model_proj", "indexer.q_proj.weight",
    "indexer.k_proj.weight",
)  # fmt: skip
_NARROW = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0",
    "NVFP4": "IQ4_NL",
}

_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_EMBEDDING = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"), "Q2_K"),
    "IQ2_S": "IQ3_S",
    "IQ2_M": "IQ3_S",
    "IQ3_XXS": "IQ3_S",
    "TQ1_0": "Q4_K",
    "TQ2_0": "Q4_K",
    "MXFP4": "Q6_K",
    "NVFP4": "Q6_K",
}  # of mixtures whose default is too coarse for it
_COARSE_HEAD = (*LOW, "IQ3_XXS")
_IMPORTANT = (
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
)  # types that are too coarse for errors that all count alike


@dataclass(frozen=True)
class Wishes:
    """Deviations from a mixture, all of them names of tensor types.

    pure: the default type for every matrix. output, embedding: of output.weight and token_embd.weight. tensors: by glob
    pattern of GGUF names, or of the end of one at a dot, with or without `.weight`; later patterns win.
    """

    pure: bool = False
    output: str | None = None
    embedding: str | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TypeChoice:
    """The type of a tensor, and the one it would have if blocks of that divided its rows."""

    type: TensorType
    wanted: TensorType


def mixture(
    tensors: Sequence[Shaped], facts: Facts, kind: FileType, wishes: Wishes | None = None
) -> dict[str, TypeChoice]:
    """The type of every tensor, in llama.cpp's order; without `wishes` those that llama-quantize chooses.

    PlanError for a pattern that fits no matrix, or for Q2_K_S without importance; RecipeError for an unknown type.
    """
    wishes = wishes or Wishes()
    ordered = sorted(tensors, key=lambda item: visiting_order(item[0]))
    matrices = [(name, shape) for name, shape in ordered if is_quantised(name, shape)]
    named = asked([name for name, _ in matrices], wishes)
    state = _State(facts, kind, wishes, [name for name, _ in ordered])
    wanted = {name: named.get(name) or state.standard(name, shape) for name, shape in matrices}
    chosen: dict[str, TypeChoice] = {}
    for name, shape in ordered:
        want = tensor_type(wanted.get(name, "F32"))
        chosen[name] = TypeChoice(_fitting(want, shape[-1]), want)
    _check_importance(chosen, facts, kind)
    return chosen


def visiting_order(name: str) -> tuple[int, str]:
    """Sorts GGUF names as llama-quantize does: what stands outside of layers, then layer by layer, each by name."""
    layer = _LAYER.match(name)
    return (int(layer[1]) if layer else -1, name)


def is_quantised(name: str, shape: Sequence[int]) -> bool:
    """Whether a mixture says anything about a tensor: all others are F32."""
    extents = list(shape)
    while len(extents) > 1 and extents[0] == 1:  # GGUF drops them
        extents = extents[1:]
    return len(extents) > 1 and name.endswith("weight") and not any(part in name for part in _NEVER)


def matches(pattern: str, name: str) -> bool:
    """Whether a glob pattern fits a GGUF name or the end of it, at a dot, with or without `.weight`."""
    short = name.removesuffix(".weight")
    ends = [".".join(whole.split(".")[start:]) for whole in (name, short) for start in range(whole.count(".") + 1)]
    return any(fnmatchcase(end, pattern) for end in ends)


def asked(names: Sequence[str], wishes: Wishes) -> dict[str, str]:
    """Types that wishes name for some of the matrices `names`.

    An embedding that is the head as well takes the head's type where nothing names it. PlanError for a pattern that
    fits none of them.
    """
    found: dict[str, str] = {}
    if wishes.output is not None and "output.weight" not in names:
        found["token_embd.weight"] = tensor_type(wishes.output).name
    for pattern, kind in wishes.tensors.items():
        fitting = [name for name in names if matches(pattern, name)]
        if not fitting:
            raise PlanError(
                f"pattern {pattern!r} fits no matrix of the file",
                f"matrices are called like {names[-1] if names else 'blk.0.ffn_up.weight'}",
            )
        found |= dict.fromkeys(fitting, tensor_type(kind).name)
    for name, wish in (("token_embd.weight", wishes.embedding), ("output.weight", wishes.output)):
        if wish is not None and name in names:
            found[name] = tensor_type(wish).name
    if wishes.embedding is not None and _EMBEDDINGS[1] in names:
        found.setdefault(_EMBEDDINGS[1], tensor_type(wishes.embedding).name)
    return found


def _fitting(kind: TensorType, width: int) -> TensorType:
    """The type itself, or one with smaller blocks, or F16, for rows of `width`."""
    if not kind.fits(width) and kind.name in _NARROW:
        kind = tensor_type(_NARROW[kind.name])
    return kind if kind.fits(width) else tensor_type("F16")


def _check_importance(chosen: Mapping[str, TypeChoice], facts: Facts, kind: FileType) -> None:
    if facts.importance:
        return
    coarse = (*_IMPORTANT, "Q2_K") if kind.name == "Q2_K_S" else _IMPORTANT
    if any(choice.type.name in coarse for name, choice in chosen.items() if _LAYER.match(name)):
        raise PlanError(f"{kind.name} needs the importance of inputs", "calibrate, give an imatrix, or take Q2_K")


class _State:
    """Standard choices, asked for in visiting order: some depend on how many of a kind came before."""

    def __init__(self, facts: Facts, kind: FileType, wishes: Wishes, names: Sequence[str]) -> None:
        self.facts, self.kind, self.wishes = facts, kind, wishes
        self.default = tensor_type(kind.default)
        self.tied = "output.weight" not in names
        self.values = sum(role_of(name) == "value" for name in names)
        self.before = dict.fromkeys(("value", "down", "up", "gate"), 0)

    def standard(self, name: str, shape: Sequence[int]) -> str:
        if self.wishes.pure or not self.default.quantised:
            return self.default.name
        if name == "output.weight" or (name in _EMBEDDINGS and self.tied):
            return self._head(shape[-1])
        if self.kind.name == "MXFP4_MOE":
            return "MXFP4" if len(shape) == 3 and shape[0] > 1 else "Q8_0"
        if name in _EMBEDDINGS:
            return _EMBEDDING.get(self.kind.name, self.default.name)
        return self._inside(name, role_of(name))

    def _head(self, width: int) -> str:
        plain = self.kind.name in ("Q8_0", "MXFP4_MOE") or not self.default.fits(width)
        return "Q8_0" if plain else "Q5_K" if self.kind.name in _COARSE_HEAD else "Q6_K"

    def _inside(self, name: str, role: str) -> str:
        eight, low = self.facts.experts == 8, self.kind.name in LOW
        if role == "value":
            chosen = self._ruled(VALUE, self._next(role), self.values)
            if low:
                return chosen
            if self.facts.seventy and chosen in ("Q3_K", "Q4_K"):
                chosen = "Q5_K"
            return "Q8_0" if eight else chosen
        if role == "key" and eight:
            return "Q4_K" if low else "Q8_0"
        if role in ("query", "key"):
            return QUERY.get(self.kind.name, self.default.name)
        if role in ("down", "up", "gate"):
            number, layer = self._next(role), visiting_order(name)[0]
            rules = DOWN if role == "down" else UP
            return self._ruled(rules, layer if self.facts.experts > 1 and not low else number, self.facts.layers)
        if role == "attention output":
            table = ATTENTION_OUTPUT_OF_8_EXPERTS if eight else ATTENTION_OUTPUT
            return table.get(self.kind.name, self.default.name)
        return self.default.name

    def _ruled(self, rules: Rules, i: int, n: int) -> str:
        place = Place(i, n, self.facts)
        fitting = (name for name, holds in rules.get(self.kind.name, ()) if holds(place))
        return next(fitting, self.default.name)

    def _next(self, role: str) -> int:
        self.before[role] += 1
        return self.before[role] - 1
