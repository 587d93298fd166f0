"""Tensors of a source that hold something of every expert, cut into parts as report.json says: by numpy alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcompress.validate.stored import WIDTHS, Array, DamageError, Tensor


@dataclass(frozen=True)
class _Cut:
    """How a tensor is cut, by report.json. share: the shape of what it holds of one expert. ways: number of parts."""

    experts: int
    share: tuple[int, ...]
    ways: int
    turned: bool
    interleaved: bool

    def part(self, share: Array, place: int) -> Array:
        """A part of an expert's share [..., bytes of a value]."""
        rows = share.swapaxes(0, 1) if self.turned else share
        count = len(rows) // self.ways
        return rows[place :: self.ways] if self.interleaved else rows[place * count : (place + 1) * count]


@dataclass(frozen=True)
class ExpertPart(Tensor):
    """A part of one expert in a tensor `whole` of all experts."""

    whole: Tensor
    cut: _Cut
    number: int
    place: int

    def raw(self) -> Array:
        size = self.whole.nbytes // self.cut.experts
        share = self.whole.raw()[self.number * size : (self.number + 1) * size]
        mine = self.cut.part(share.reshape(*self.cut.share, WIDTHS[self.dtype]), self.place)
        return np.ascontiguousarray(mine).reshape(-1)


def parts_of_stack(tensor: Tensor, stack: Mapping[str, Any]) -> list[Tensor]:
    """What every expert has of a tensor; DamageError where report.json says of it what its shape does not bear out."""
    names, experts = stack.get("parts"), stack.get("experts")
    flat, turned, interleaved = (stack.get(key) is True for key in ("flat", "turned", "interleaved"))
    if not isinstance(names, list) or not names or not isinstance(experts, int) or experts < 1 or 0 in tensor.shape:
        raise DamageError(f"report.json does not say how {tensor.name} holds experts")
    first, *rest = tensor.shape if tensor.shape else (0,)
    share = (first // experts, *rest) if flat else tuple(rest)
    rows = share[-1 if turned else 0] if share else 0
    if first % experts or not (flat or first == experts) or rows % len(names) or not rows or turned > (len(share) == 2):
        raise DamageError(
            f"{tensor.name} is {list(tensor.shape)}, not {len(names)} matrices of each of {experts} experts"
        )
    cut = _Cut(experts, share, len(names), turned, interleaved)
    shape = (rows // len(names), *(share[:-1] if turned else share[1:]))
    size = tensor.nbytes // experts // len(names)
    return [
        ExpertPart(
            str(name).replace("{e}", str(number)), tensor.dtype, shape, tensor.file, 0, size, tensor, cut, number, place
        )
        for number in range(experts)
        for place, name in enumerate(names)
    ]
