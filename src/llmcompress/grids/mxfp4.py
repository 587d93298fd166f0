"""MXFP4: floats of 4 bits (E2M1) in groups of 32 that share a power of two (OCP Microscaling Formats 1.0, section 5.3).

A group's scale is 2^(e - 127), stored as the byte e.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from llmcompress.grids.base import Clip
from llmcompress.grids.blocks import whole_blocks
from llmcompress.grids.chosen_scales import BIAS, PowerScaleGrid
from llmcompress.grids.coded import Coded
from llmcompress.grids.e2m1 import (
    LARGEST,
    E2m1Grid,
    E2m1Spec,
    E2m1Type,
    halves,
    nearest_levels,
    paired,
    unhalved,
    unpaired,
)
from llmcompress.grids.grid_type import Fitting
from llmcompress.lazy import Tensor, torch


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
class Mxfp4Grid(E2m1Grid, PowerScaleGrid):
    """Fitted grid of a matrix [out, in]."""

    spec: Mxfp4Spec

    exponents: ClassVar[tuple[int, int]] = (-126, 125)
    largest: ClassVar[float] = LARGEST
    beside: ClassVar[tuple[int, ...]] = (-1, -2, 1)

    @staticmethod
    def nearest(values: Tensor) -> Tensor:
        return nearest_levels(values)

    def packed(self, codes: Tensor) -> dict[str, Tensor]:
        return {"weight_packed": paired(codes), "weight_scale": self.scale_bytes}

    def gguf_rows(self, codes: Tensor) -> Tensor:
        return torch.cat([self.scale_bytes.unsqueeze(-1), halves(codes, self.spec.group_size)], dim=2).flatten(1)


class Mxfp4(E2m1Type):
    """Floats of 4 bits times a power of two of their group."""

    name = "mxfp4"
    place = 6
    values = "4-bit floats in blocks of 32"
    pattern = "mxfp4"
    made = Mxfp4Spec()

    def fit(self, weight: Tensor, spec: Mxfp4Spec, how: Fitting) -> Mxfp4Grid:
        return fit(weight, how.clip, how.importance)

    def restored(self, spec: Mxfp4Spec, width: int, parts: Mapping[str, Tensor]) -> Mxfp4Grid:
        return Mxfp4Grid(spec, parts["exponent"].to(torch.float32))

    def unpacked(self, spec: Mxfp4Spec, parts: Mapping[str, Tensor]) -> Coded:
        exponent = parts["weight_scale"].to(torch.float32) - BIAS
        return Coded(unpaired(parts["weight_packed"]), Mxfp4Grid(spec, exponent))

    def of_gguf_rows(self, spec: Mxfp4Spec, rows: Tensor) -> Coded:
        blocks = whole_blocks(rows, 1 + spec.group_size // 2, spec.gguf_type)
        return Coded(unhalved(blocks[..., 1:]), Mxfp4Grid(spec, blocks[..., 0].to(torch.float32) - BIAS))


GRID = Mxfp4()


def fit(weight: Tensor, clip: Clip = "search", importance: Tensor | None = None) -> Mxfp4Grid:
    """The grid of weight [out, in] float32, as `PowerScaleGrid.fitted` chooses it."""
    return Mxfp4Grid.fitted(weight, Mxfp4Spec(), clip, importance)
