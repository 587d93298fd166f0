"""MXFP4: floats of 4 bits (E2M1) in groups of 32 that share a power of two (OCP Microscaling Formats 1.0, section 5.3).

A group's scale is 2^(e - 127), stored as the byte e.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from llmcompress.grids.base import Clip
from llmcompress.grids.blocks import whole_blocks
from llmcompress.grids.coded import Coded
from llmcompress.grids.e2m1 import (
    LARGEST,
    E2m1Grid,
    E2m1Spec,
    E2m1Type,
    best_scale,
    by_blocks,
    halves,
    paired,
    unhalved,
    unpaired,
)
from llmcompress.grids.grid_type import Fitting
from llmcompress.lazy import Tensor, torch

_BIAS = 127
_EXPONENTS = (-126, 125)  # of scales whose multiples float32 holds like any other number
_TRIED = (0, -1, -2, 1)  # exponents beside the one whose range covers a group


@dataclass(frozen=True)
class Mxfp4Spec(E2m1Spec):
    """E2M1 codes times a power of two for each 32 input channels of a row."""

    type: ClassVar[str] = "mxfp4"
    name: ClassVar[str] = "mxfp4"
    group_size: ClassVar[int] = 32
    gguf_type: ClassVar[str] = "MXFP4"

    def parts(self, rows: int, width: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {"weight_packed": ("U8", (rows, width // 2)), "weight_scale": ("U8", (rows, self.groups(width)))}


@dataclass(frozen=True)
class Mxfp4Grid(E2m1Grid):
    """Fitted grid of a matrix [out, in]: exponent [out, groups] float32 whole numbers, of the scales."""

    spec: Mxfp4Spec
    exponent: Tensor

    by_row: ClassVar[Mapping[str, str | None]] = {"exponent": "int8"}

    @property
    def scale(self) -> Tensor:
        return torch.exp2(self.exponent)

    def tried(self, old: Tensor, wanted: Tensor) -> Sequence[Tensor]:
        least, most = (2.0**end for end in _EXPONENTS)
        return [(old * factor).clamp(least, most) for factor in (0.5, 2.0)]

    def rescaled(self, scale: Tensor, rows: Tensor) -> Mxfp4Grid:
        return replace(self, exponent=torch.where(rows[:, None], torch.log2(scale), self.exponent))

    def packed(self, codes: Tensor) -> dict[str, Tensor]:
        return {"weight_packed": paired(codes), "weight_scale": (self.exponent + _BIAS).to(torch.uint8)}

    def gguf_rows(self, codes: Tensor) -> Tensor:
        exponents = (self.exponent + _BIAS).to(torch.uint8).unsqueeze(-1)
        return torch.cat([exponents, halves(codes, self.spec.group_size)], dim=2).flatten(1)


class Mxfp4(E2m1Type):
    """Floats of 4 bits times a power of two of their group."""

    name = "mxfp4"
    place = 6
    values = "4-bit floats (E2M1) times a power of two in blocks of 32"
    pattern = "mxfp4"
    made = Mxfp4Spec()

    def fit(self, weight: Tensor, spec: Mxfp4Spec, how: Fitting) -> Mxfp4Grid:
        return fit(weight, how.clip, how.importance)

    def restored(self, spec: Mxfp4Spec, width: int, parts: Mapping[str, Tensor]) -> Mxfp4Grid:
        return Mxfp4Grid(spec, parts["exponent"].to(torch.float32))

    def unpacked(self, spec: Mxfp4Spec, parts: Mapping[str, Tensor]) -> Coded:
        exponent = parts["weight_scale"].to(torch.float32) - _BIAS
        return Coded(unpaired(parts["weight_packed"]), Mxfp4Grid(spec, exponent))

    def of_gguf_rows(self, spec: Mxfp4Spec, rows: Tensor) -> Coded:
        blocks = whole_blocks(rows, 1 + spec.group_size // 2, spec.gguf_type)
        return Coded(unhalved(blocks[..., 1:]), Mxfp4Grid(spec, blocks[..., 0].to(torch.float32) - _BIAS))


GRID = Mxfp4()


def fit(weight: Tensor, clip: Clip = "search", importance: Tensor | None = None) -> Mxfp4Grid:
    """Choose the exponents for weight [out, in] float32.

    minmax: the least whose range covers the group, which loses less than the rule of the specification. search: of that
    one and its neighbours the one of least squared error, each input channel weighted by importance [in].
    """

    def exponents(block: Tensor, weigh: Tensor) -> Tensor:
        covering = torch.log2(block.abs().amax(-1) / LARGEST).ceil_().clamp_(*_EXPONENTS)
        steps = _TRIED if clip != "minmax" else _TRIED[:1]
        scales = [torch.exp2((covering + step).clamp_(*_EXPONENTS)) for step in steps]
        return torch.log2(best_scale(block, weigh, scales))

    return Mxfp4Grid(Mxfp4Spec(), by_blocks(weight, Mxfp4Spec.group_size, importance, exponents))
