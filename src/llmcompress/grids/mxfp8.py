"""MXFP8: floats of 8 bits (E4M3) in groups of 32 that share a power of two (OCP Microscaling Formats 1.0, section 5.2).

A group's scale is 2^(e - 127), stored as the byte e.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from llmcompress.grids.base import GridRequest, Spec
from llmcompress.grids.chosen_scales import BIAS, PowerScaleGrid
from llmcompress.grids.coded import Coded
from llmcompress.grids.e4m3 import LARGEST, E4m3Grid, rounded_
from llmcompress.grids.grid_type import Fitting, GridType
from llmcompress.lazy import Tensor, torch


@dataclass(frozen=True)
class Mxfp8Spec(Spec):
    """E4M3 codes times a power of two for each 32 input channels of a row."""

    type: ClassVar[str] = "mxfp8"
    name: ClassVar[str] = "mxfp8"
    bits: ClassVar[int] = 8
    group_size: ClassVar[int] = 32
    symmetric: ClassVar[bool] = True
    scaled: ClassVar[bool] = True

    def bits_per_weight(self, in_features: int) -> float:
        return self.bits + 8 / self.group_size

    def parts(self, rows: int, width: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {"weight": ("F8_E4M3", (rows, width)), "weight_scale": ("U8", (rows, self.groups(width)))}


@dataclass(frozen=True)
class Mxfp8Grid(E4m3Grid, PowerScaleGrid):
    """Fitted grid of a matrix [out, in]."""

    spec: Mxfp8Spec

    exponents: ClassVar[tuple[int, int]] = (-117, 118)
    largest: ClassVar[float] = LARGEST
    beside: ClassVar[tuple[int, ...]] = (-1,)

    @staticmethod
    def nearest(values: Tensor) -> Tensor:
        return rounded_(values)

    def packed(self, codes: Tensor) -> dict[str, Tensor]:
        return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": self.scale_bytes}


class Mxfp8(GridType):
    """Floats of 8 bits times a power of two of their group."""

    name = "mxfp8"
    place = 8
    values = "8-bit floats in blocks of 32"
    pattern = "mxfp8"
    widths = (8,)
    formats = ("compressed-tensors",)

    def named(self, found: re.Match[str]) -> Spec:
        return Mxfp8Spec()

    def spec(self, asked: GridRequest) -> Spec:
        return Mxfp8Spec()

    def specs(self) -> list[Spec]:
        return [Mxfp8Spec()]

    def listed(self) -> list[tuple[str, str]]:
        return [("mxfp8", "253 floats (E4M3); 8.250 bits per weight")]

    def fit(self, weight: Tensor, spec: Mxfp8Spec, how: Fitting) -> Mxfp8Grid:
        return Mxfp8Grid.fitted(weight, spec, how.clip, how.importance)

    def restored(self, spec: Mxfp8Spec, width: int, parts: Mapping[str, Tensor]) -> Mxfp8Grid:
        return Mxfp8Grid(spec, parts["exponent"].to(torch.float32))

    def unpacked(self, spec: Mxfp8Spec, parts: Mapping[str, Tensor]) -> Coded:
        exponent = parts["weight_scale"].to(torch.float32) - BIAS
        return Coded(parts["weight"].view(torch.uint8), Mxfp8Grid(spec, exponent))


GRID = Mxfp8()
