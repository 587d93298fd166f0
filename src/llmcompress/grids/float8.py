"""Floats of 8 bits as a grid: E4M3 codes (torch.float8_e4m3fn) times one scale per output row.

There are 253 values: 448 at most, three bits of mantissa down to 2^-6, multiples of 2^-9 below. Codes are the bits of
the float; minus zero and the two that are no numbers are never chosen. Source: Micikevicius et al., 2022,
arXiv:2209.05433, table 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from llmcompress.grids.base import GridSpec
from llmcompress.grids.integer import SMALLEST_SCALE, Clip, natural_groups, storable
from llmcompress.hardware import at_once

LARGEST = 448.0
_NORMAL = 2.0**-6  # least value with all three bits of mantissa
_EXPONENT = 0x7F800000  # of a float32
_PIN = 1.5 * 2.0**20  # times 2^e, added and taken away again: leaves multiples of 2^(e-3)
_CHUNK = 1 << 17  # weights searched at once: the temporaries stay in the cache
# a float's relative step is the same within an octave but for where it begins: scales of one octave try all beginnings
_FACTORS = tuple(2.0 ** (step / 8) for step in (*range(-3, 0), *range(1, 8)))


def rounded_(values: Tensor) -> Tensor:
    """Round float32 values of any shape to the nearest E4M3 floats, ties to even, in place; zero is never negative."""
    pin = (values.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(_NORMAL, 256.0).mul_(_PIN)
    return values.add_(pin).sub_(pin).clamp_(-LARGEST, LARGEST)


@dataclass(frozen=True)
class FloatGrid:
    """Fitted float grid of a matrix [out, in]: scale [out, 1] float32, values exact in the stored type."""

    spec: GridSpec
    scale: Tensor
    group_index: Tensor

    offset: ClassVar[None] = None
    table: ClassVar[None] = None
    rounded_ = staticmethod(rounded_)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Least and largest level of each row [out, 1]."""
        most = torch.full_like(self.scale, LARGEST)
        return -most, most

    def levels(self, codes: Tensor) -> Tensor:
        """Levels float32 of codes uint8 [out, in]: the floats they are."""
        return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)

    def codes(self, levels: Tensor) -> Tensor:
        """Codes uint8 of the floats nearest to levels [out, in]."""
        nearest = rounded_(levels.to(torch.float32, copy=True))
        return nearest.to(torch.float8_e4m3fn).view(torch.uint8)

    def encode(self, weight: Tensor) -> Tensor:
        """Nearest codes uint8 of a whole matrix [out, in]."""
        return self.codes(weight / self.scale)

    def decode(self, codes: Tensor) -> Tensor:
        """Values float32 of codes [out, in]: the formula every engine uses."""
        return self.levels(codes) * self.scale

    def stored(self) -> dict[str, Tensor]:
        """Tensors that tell this grid from others of its spec; `restored` takes them back."""
        return {"scale": self.scale}

    @classmethod
    def restored(cls, spec: GridSpec, in_features: int, *, scale: Tensor) -> "FloatGrid":
        return cls(spec, scale, natural_groups(spec, in_features))

    def to(self, device: torch.device | str) -> "FloatGrid":
        """The same grid on another device."""
        return FloatGrid(self.spec, self.scale.to(device), self.group_index.to(device))

    def rescaled(self, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> "FloatGrid":
        """The grid with other scales [out, 1], rounded to `storable` ones, where `rows` [out] is true."""
        return replace(self, scale=torch.where(rows[:, None], storable(scale, dtype), self.scale))

    def rows(self, index: slice | Tensor) -> "FloatGrid":
        """The grid of some output rows."""
        return replace(self, scale=self.scale[index])

    @classmethod
    def stacked(cls, grids: "Sequence[FloatGrid]") -> "FloatGrid":
        """The grid of matrices whose rows follow one another."""
        return replace(grids[0], scale=torch.cat([grid.scale for grid in grids]))


def fit_float8(
    weight: Tensor,
    spec: GridSpec,
    *,
    clip: Clip = "search",
    importance: Tensor | None = None,
    scale_dtype: torch.dtype = torch.float16,
) -> FloatGrid:
    """Choose scales for weight [out, in] float32.

    minmax: the largest weight of a row is 448 scales. search: of scales around that, the one that loses least squared
    error, each input channel weighted by importance [in], then the least-squares scale for the codes it gives; the
    min-max one is a candidate and wins ties.
    """
    weigh = torch.ones(weight.shape[1], device=weight.device) if importance is None else importance.to(torch.float32)
    step = max(1, at_once(weight, _CHUNK) // weight.shape[1])
    parts = [_scales(rows, weigh, clip, scale_dtype) for rows in torch.split(weight, step)]
    return FloatGrid(spec, torch.cat(parts), natural_groups(spec, weight.shape[1]).to(weight.device))


def _scales(rows: Tensor, weigh: Tensor, clip: Clip, dtype: torch.dtype) -> Tensor:
    """Scales [rows, 1] of weights [rows, in]."""
    whole = rows.abs().amax(dim=1, keepdim=True) / LARGEST
    best = _exact(whole, dtype)
    if clip == "minmax":
        return best
    least, levels = _loss(rows, weigh, best)
    candidates = [whole * factor for factor in _FACTORS]
    for number in range(len(candidates) + 2):
        refit = (levels * rows * weigh).sum(1, keepdim=True) / (levels**2 * weigh).sum(1, keepdim=True).clamp_min(1e-30)
        scale = _exact(candidates[number] if number < len(candidates) else refit, dtype)
        loss, found = _loss(rows, weigh, scale)
        better = loss < least
        least, best = torch.where(better, loss, least), torch.where(better, scale, best)
        levels = torch.where(better, found, levels)
    return best


def _loss(rows: Tensor, weigh: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted squared error [rows, 1] of rounding, and the levels."""
    levels = rounded_(rows / scale)
    return ((levels * scale).sub_(rows).square_().mul_(weigh)).sum(1, keepdim=True), levels


def _exact(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales rounded to values of the type they are stored in, never zero; float32."""
    return scale.to(dtype).to(torch.float32).clamp_min(SMALLEST_SCALE)
