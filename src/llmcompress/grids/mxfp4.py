"""MXFP4: floats of 4 bits (E2M1) in groups of 32 that share a power of two (OCP Microscaling Formats 1.0, section 5.3).

A code is a sign and one of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; a group's scale is 2^(e - 127), stored as the
byte e. The code of minus zero is read and never chosen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from llmcompress.grids.base import Clip, GridRequest, Spec
from llmcompress.grids.coded import Coded, Grid
from llmcompress.grids.grid_type import Fitting, GridType
from llmcompress.grids.scales import between, natural_groups, positive, row_costs, scale_loss
from llmcompress.hardware import at_once
from llmcompress.lazy import Tensor, torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LEVELS = (*(-level for level in MAGNITUDES[:0:-1]), *MAGNITUDES)  # in ascending order, zero once
_CODES = (*range(15, 8, -1), *range(8))  # of those levels
_BIAS = 127
_EXPONENTS = (-126, 125)  # of scales whose multiples float32 holds like any other number
_TRIED = (-1, -2, 1)  # exponents beside the one whose range covers a group
_ROUNDS = 2  # of descent on exponents
_CHUNK = 1 << 17  # weights searched at once: the temporaries stay in the cache


@dataclass(frozen=True)
class Mxfp4Spec(Spec):
    """E2M1 codes times a power of two for each 32 input channels of a row."""

    type: ClassVar[str] = "mxfp4"
    name: ClassVar[str] = "mxfp4"
    bits: ClassVar[int] = 4
    group_size: ClassVar[int] = 32
    symmetric: ClassVar[bool] = True
    scaled: ClassVar[bool] = True

    def bits_per_weight(self, in_features: int) -> float:
        return self.bits + 8 / self.group_size

    def parts(self, rows: int, width: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {"weight_packed": ("U8", (rows, width // 2)), "weight_scale": ("U8", (rows, self.groups(width)))}


@dataclass(frozen=True)
class Mxfp4Grid(Grid):
    """Fitted grid of a matrix [out, in]: exponent [out, groups] float32 whole numbers, of the scales."""

    spec: Mxfp4Spec
    exponent: Tensor

    by_row: ClassVar[Mapping[str, str | None]] = {"exponent": "int8"}

    @property
    def scale(self) -> Tensor:
        return torch.exp2(self.exponent)

    @property
    def group_index(self) -> Tensor:
        width = self.exponent.shape[1] * self.spec.group_size
        return natural_groups(self.spec, width).to(self.exponent.device)

    @property
    def table(self) -> Tensor:
        return torch.tensor(LEVELS, device=self.exponent.device)

    def levels(self, codes: Tensor) -> Tensor:
        sizes = torch.tensor((*MAGNITUDES, *(-level for level in MAGNITUDES)), device=codes.device)
        return sizes[codes.long()]

    def codes(self, levels: Tensor) -> Tensor:
        place = torch.bucketize(levels.contiguous(), between(self.table), right=True)
        return torch.tensor(_CODES, dtype=torch.uint8, device=levels.device)[place]

    def encode(self, weight: Tensor) -> Tensor:
        return self.codes(weight / self._spread())

    def decode(self, codes: Tensor) -> Tensor:
        return self.levels(codes) * self._spread()

    def _spread(self) -> Tensor:
        return self.scale.repeat_interleave(self.spec.group_size, dim=1)

    def refit(self, codes: Tensor, hessian: Tensor, target: Tensor, scale_dtype: torch.dtype) -> Coded:
        """Better exponents, each moved by one where that lowers the loss, the others held; no row gets worse."""
        square, linear = scale_loss(codes, self, hessian, target)
        before = self.scale
        scale, bend = before.clone(), square.diagonal(dim1=1, dim2=2)
        least, most = (2.0**end for end in _EXPONENTS)
        slope = linear - torch.einsum("rgh,rh->rg", square, scale)
        for _ in range(_ROUNDS):
            for group in range(scale.shape[1]):
                old = scale[:, group]
                best, gain = old, torch.zeros_like(old)
                for factor in (0.5, 2.0):
                    tried = (old * factor).clamp(least, most)
                    step = tried - old
                    found = 2 * step * slope[:, group] - step * step * bend[:, group]
                    best, gain = torch.where(found > gain, tried, best), torch.maximum(found, gain)
                slope = slope - square[:, :, group] * (best - old).unsqueeze(1)
                scale[:, group] = best
        better = row_costs(square, linear, scale) < row_costs(square, linear, before)
        return Coded(codes, replace(self, exponent=torch.where(better[:, None], torch.log2(scale), self.exponent)))

    def packed(self, codes: Tensor) -> dict[str, Tensor]:
        pairs = codes.reshape(codes.shape[0], -1, 2)
        exponents = (self.exponent + _BIAS).to(torch.uint8)
        return {"weight_packed": pairs[..., 0] | pairs[..., 1] << 4, "weight_scale": exponents}


class Mxfp4(GridType):
    """Floats of 4 bits times a power of two of their group."""

    name = "mxfp4"
    place = 6
    values = "4-bit floats (E2M1) times a power of two in blocks of 32"
    pattern = "mxfp4"
    widths = (4,)
    formats = ("compressed-tensors",)

    def named(self, found: re.Match[str]) -> Spec:
        return Mxfp4Spec()

    def spec(self, asked: GridRequest) -> Spec:
        return Mxfp4Spec()

    def specs(self) -> list[Spec]:
        return [Mxfp4Spec()]

    def fit(self, weight: Tensor, spec: Mxfp4Spec, how: Fitting) -> Mxfp4Grid:
        return fit(weight, how.clip, how.importance)

    def restored(self, spec: Mxfp4Spec, width: int, parts: Mapping[str, Tensor]) -> Mxfp4Grid:
        return Mxfp4Grid(spec, parts["exponent"].to(torch.float32))

    def unpacked(self, spec: Mxfp4Spec, parts: Mapping[str, Tensor]) -> Coded:
        pairs = parts["weight_packed"]
        codes = torch.stack([pairs & 15, pairs >> 4], dim=2).reshape(pairs.shape[0], -1)
        return Coded(codes, Mxfp4Grid(spec, parts["weight_scale"].to(torch.float32) - _BIAS))


GRID = Mxfp4()


def fit(weight: Tensor, clip: Clip = "search", importance: Tensor | None = None) -> Mxfp4Grid:
    """Choose the exponents for weight [out, in] float32.

    minmax: the least whose range covers the group, which loses less than the rule of the specification. search: of that
    one and its neighbours the one of least squared error, each input channel weighted by importance [in].
    """
    width, size = weight.shape[1], Mxfp4Spec.group_size
    weigh = torch.ones(width, device=weight.device) if importance is None else importance.to(torch.float32)
    weigh = positive(weigh).view(1, -1, size)
    parts = torch.split(weight, max(1, at_once(weight, _CHUNK) // width))
    exponents = [_exponents(part.reshape(len(part), -1, size), weigh, clip) for part in parts]
    return Mxfp4Grid(Mxfp4Spec(), torch.cat(exponents))


def _exponents(block: Tensor, weigh: Tensor, clip: Clip) -> Tensor:
    """Exponents [rows, groups] of block [rows, groups, 32]."""
    covering = torch.log2(block.abs().amax(-1) / MAGNITUDES[-1]).ceil_().clamp_(*_EXPONENTS)
    if clip == "minmax":
        return covering
    best, least = covering, _lost(block, weigh, covering)
    for step in _TRIED:
        tried = (covering + step).clamp_(*_EXPONENTS)
        loss = _lost(block, weigh, tried)
        best, least = torch.where(loss < least, tried, best), torch.minimum(loss, least)
    return best


def _lost(block: Tensor, weigh: Tensor, exponent: Tensor) -> Tensor:
    """Weighted squared error [rows, groups] of rounding a block."""
    scale, table = torch.exp2(exponent).unsqueeze(-1), torch.tensor(LEVELS, device=block.device)
    levels = table[torch.bucketize(block / scale, between(table), right=True)]
    return (levels * scale).sub_(block).square_().mul_(weigh).sum(-1)
