"""The grid of LLM.int8(): rows of codes -127 ... 127, decoded as bitsandbytes does, beside outlier channels.

W[n, k] = code[n, k] * absmax[n] * (1 / 127), the last factor as float32. Outlier channels hold float16 weights: their
codes are zero and they do not widen the absmax (arXiv:2208.07339, section 3, with channels chosen beforehand).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from llmcompress.grids.base import Int8Spec
from llmcompress.grids.blocks import float16
from llmcompress.grids.integer import Clip, positive
from llmcompress.hardware import at_once

_STEP = 0.007874015718698502  # 1 / 127, as bitsandbytes has it
_LIMIT = 127
_SHRINKS = (0.97, 0.94, 0.91, 0.88)
_CHUNK = 1 << 17  # weights searched at once: the temporaries stay in the cache


@dataclass(frozen=True)
class Int8Grid:
    """Fitted grid of a matrix [out, in = width]. absmax [out, 1] float32.

    index [k] int64: the outlier channels, ascending, then -1 in places that are free. outliers [out, k] float32 holding
    float16 values. Both have k = 0 for a spec without outliers.
    """

    spec: Int8Spec
    width: int
    absmax: Tensor
    index: Tensor
    outliers: Tensor

    offset: ClassVar[None] = None  # what is added to scale * level
    table: ClassVar[None] = None  # of levels, where they are neither whole numbers one apart nor floats
    rounded_ = staticmethod(torch.round_)

    @property
    def scale(self) -> Tensor:
        """Scale of each row [out, 1]."""
        return self.absmax * _STEP

    @property
    def group_index(self) -> Tensor:
        """[in] int64: the group of each input channel, of which there is one."""
        return torch.zeros(self.width, dtype=torch.int64, device=self.absmax.device)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Least and largest level of each row [out, 1]."""
        most = torch.full_like(self.absmax, _LIMIT)
        return -most, most

    def levels(self, codes: Tensor) -> Tensor:
        """Levels float32 of codes [out, in]: what they stand for, in units of the scale."""
        return codes.to(torch.float32) - self.spec.middle

    def codes(self, levels: Tensor) -> Tensor:
        """Codes uint8 of levels [out, in]."""
        return (levels + self.spec.middle).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Values float32 of codes uint8 [out, in]."""
        value = self.levels(codes).mul_(self.absmax).mul_(_STEP)
        held = self.index >= 0
        value[:, self.index[held]] = self.outliers[:, held]
        return value

    def encode(self, weight: Tensor) -> Tensor:
        """Nearest codes uint8 of a whole matrix [out, in]; level zero where a row's absmax is, and in outliers."""
        inverse = torch.where(self.absmax == 0, 0.0, _LIMIT / self.absmax)
        levels = (weight * inverse).round_().clamp_(-_LIMIT, _LIMIT)
        levels[:, self.index[self.index >= 0]] = 0
        return self.codes(levels)

    def rescaled(self, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> "Int8Grid":
        """The grid with other scales [out, 1] in the rows where `rows` [out] is true. dtype: says nothing here."""
        return replace(self, absmax=torch.where(rows[:, None], scale * _LIMIT, self.absmax))

    def stored(self) -> dict[str, Tensor]:
        """Tensors that tell this grid from others of its spec, in small types; `restored` takes them back."""
        return {
            "width": torch.tensor(self.width),
            "absmax": self.absmax,
            "index": self.index.to(torch.int32),
            "outliers": self.outliers.to(torch.float16),
        }

    @classmethod
    def restored(cls, spec: Int8Spec, *, width: Tensor, absmax: Tensor, index: Tensor, outliers: Tensor) -> "Int8Grid":
        return cls(spec, int(width), absmax, index.to(torch.int64), outliers.to(torch.float32))

    def to(self, device: torch.device | str) -> "Int8Grid":
        """The same grid on another device."""
        moved = (part.to(device) for part in (self.absmax, self.index, self.outliers))
        return Int8Grid(self.spec, self.width, *moved)

    def rows(self, index: slice | Tensor) -> "Int8Grid":
        """The grid of some output rows."""
        return replace(self, absmax=self.absmax[index], outliers=self.outliers[index])

    @classmethod
    def stacked(cls, grids: "Sequence[Int8Grid]") -> "Int8Grid":
        """The grid of matrices whose rows follow one another."""
        absmax, outliers = torch.cat([grid.absmax for grid in grids]), torch.cat([grid.outliers for grid in grids])
        return replace(grids[0], absmax=absmax, outliers=outliers)


def fit(weight: Tensor, *, clip: Clip = "search", importance: Tensor | None = None) -> Int8Grid:
    """Choose the scales of weight [out, in] float32, none of whose channels are outliers.

    minmax: the absmax, as bitsandbytes takes it. search: what loses least squared error, each input channel weighted
    by importance [in]; absmax is a candidate.
    """
    width = weight.shape[1]
    weigh = positive(torch.ones(width, device=weight.device) if importance is None else importance.to(torch.float32))
    parts = torch.split(weight, max(1, at_once(weight, _CHUNK) // width))
    scales = [part.abs().amax(1, keepdim=True) if clip == "minmax" else _searched(part, weigh) for part in parts]
    none = torch.empty(0, dtype=torch.int64, device=weight.device)
    return Int8Grid(Int8Spec(), width, torch.cat(scales), none, weight.new_empty(weight.shape[0], 0))


def _searched(weight: Tensor, weigh: Tensor) -> Tensor:
    """absmax [rows, 1] of weight [rows, in] by weighted least squares."""
    largest = weight.abs().amax(1, keepdim=True)
    best, least = largest, torch.full_like(largest, torch.inf)
    for shrink in (1.0, *_SHRINKS):
        tried = largest * shrink
        scale = tried * _STEP
        levels = (weight * torch.where(scale == 0, 0.0, 1 / scale)).round_().clamp_(-_LIMIT, _LIMIT)
        loss = (levels.mul_(scale).sub_(weight).square_() @ weigh).unsqueeze(1)
        best, least = torch.where(loss < least, tried, best), torch.minimum(loss, least)
    return best


def beside_outliers(
    codes: Tensor, grid: Int8Grid, index: Tensor, outliers: Tensor, width: int
) -> tuple[Tensor, Int8Grid]:
    """Codes [out, in = width] and grid of a matrix whose other channels are codes [out, in - n] on `grid`.

    index [k]: the outlier channels, ascending, then -1 in free places; n of them are not. outliers [out, n] float32.
    """
    held = index[index >= 0]
    rest = torch.ones(width, dtype=torch.bool, device=codes.device)
    rest[held] = False
    spread = torch.full((codes.shape[0], width), grid.spec.middle, dtype=torch.uint8, device=codes.device)
    spread[:, rest] = codes
    kept = torch.zeros(codes.shape[0], index.numel(), device=codes.device)
    kept[:, : held.numel()] = float16(outliers)
    return spread, Int8Grid(Int8Spec(index.numel()), width, grid.absmax, index, kept)
