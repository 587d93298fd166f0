"""Floats of 4 bits (E2M1), of which groups share a scale: what MXFP4 and NVFP4 have in common.

A code is a sign and one of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. The code of minus zero is read and never chosen.
Two codes lie in a byte, the first in the low bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from llmcompress.grids.base import GridRequest, Spec
from llmcompress.grids.chosen_scales import ChosenScaleGrid
from llmcompress.grids.e4m3 import snapped_
from llmcompress.grids.grid_type import GridType
from llmcompress.grids.level_table import level_table
from llmcompress.lazy import Tensor, torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = MAGNITUDES[-1]
LEVELS = (*(-level for level in MAGNITUDES[:0:-1]), *MAGNITUDES)  # in ascending order, zero once
_CODES = (*range(15, 8, -1), *range(8))  # of those levels


class E2m1Spec(Spec):
    """Plain data of a grid of 4-bit floats."""

    bits: ClassVar[int] = 4
    symmetric: ClassVar[bool] = True
    scaled: ClassVar[bool] = True

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight; what is stored once for a matrix is not counted."""
        return self.bits + 8 / self.group_size


@dataclass(frozen=True)
class E2m1Grid(ChosenScaleGrid):
    """Fitted grid of a matrix [out, in] of 4-bit floats whose scales are of a small set."""

    @property
    def table(self) -> Tensor:
        return torch.tensor(LEVELS, device=self.scale.device)

    @property
    def scale_parts(self) -> tuple[Tensor, Tensor | None]:
        """The scales [out, groups] as they are stored, and the factor [1] of all of them where there is one."""
        return self.scale, None

    def levels(self, codes: Tensor) -> Tensor:
        sizes = torch.tensor((*MAGNITUDES, *(-level for level in MAGNITUDES)), device=codes.device)
        return sizes[codes.long()]

    def codes(self, levels: Tensor) -> Tensor:
        place = level_table(LEVELS, levels.device).codes(levels)
        return torch.tensor(_CODES, dtype=torch.uint8, device=levels.device)[place.int()]


class E2m1Type(GridType):
    """Floats of 4 bits, of which there is one spec. made: that spec."""

    widths = (4,)
    formats: ClassVar[tuple[str, ...]] = ("compressed-tensors",)
    made: ClassVar[Spec]

    def named(self, found: re.Match[str]) -> Spec:
        return self.made

    def spec(self, asked: GridRequest) -> Spec:
        return self.made

    def specs(self) -> list[Spec]:
        return [self.made]


def paired(codes: Tensor) -> Tensor:
    """Bytes [out, in / 2] of codes [out, in]."""
    pairs = codes.reshape(codes.shape[0], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def unpaired(pairs: Tensor) -> Tensor:
    """The inverse of `paired`."""
    return torch.stack([pairs & 15, pairs >> 4], dim=2).reshape(pairs.shape[0], -1)


def halves(codes: Tensor, size: int) -> Tensor:
    """Bytes [out, blocks, size / 2] of codes [out, in], as GGUF pairs them: a block's first half in the low bits."""
    blocks = codes.reshape(codes.shape[0], -1, 2, size // 2)
    return blocks[:, :, 0] | blocks[:, :, 1] << 4


def unhalved(bytes_: Tensor) -> Tensor:
    """The inverse of `halves`."""
    return torch.stack([bytes_ & 15, bytes_ >> 4], dim=2).reshape(bytes_.shape[0], -1)


def rounded_(values: Tensor) -> Tensor:
    """Round float32 values of any shape to the nearest levels, ties to those with an even code, in place."""
    return snapped_(values, 1, 1.0, 4.0).clamp_(-LARGEST, LARGEST)


def nearest_levels(values: Tensor) -> Tensor:
    """Values in units of their scales to the nearest levels; one between two goes to the upper."""
    return level_table(LEVELS, values.device).nearest(values)
