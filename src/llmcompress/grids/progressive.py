"""Progressive groups (QServe, arXiv:2405.04532, section 4.1): 4-bit codes of whole numbers of 8 bits of a row.

A value is (code - zero) * s1 * s0 with a float16 scale s0 for each row and, for each group, whole numbers: s1 of
1 ... 16 and zero of 0 ... 15. A kernel multiplies codes by s1, subtracts zero * s1 and has int8 to multiply by int8
inputs; the protective range sees to it that nothing overflows: weights fill -119 ... 119 of those whole numbers, of
which rounding to a multiple of s1 makes 126 at most (121 where ties go to even). Here it belongs to the grid, so that
codes chosen in any other way, such as by error feedback, stay within -127 ... 127 as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from llmcompress.errors import RecipeError
from llmcompress.grids import integer
from llmcompress.grids.base import Clip, GridRequest, InputSpec, Spec
from llmcompress.grids.coded import Coded, Grid, wide
from llmcompress.grids.errors import positive
from llmcompress.grids.grid_type import Fitting, GridType
from llmcompress.grids.scales import gains, natural_groups, scale_loss, storable
from llmcompress.hardware import at_once
from llmcompress.lazy import Tensor, torch

PROGRESSIVE_GROUPS = (32, 64, 128)
LIMIT = 119  # of whole numbers that weights are made to fill
LARGEST = 127  # magnitude of a decoded whole number
LARGEST_MULTIPLE = 16  # s1
_FACTORS = (1.08, 1.04, 0.96, 0.92, 0.88, 0.84, 0.80, 0.76, 0.72)  # of the min-max s0, tried beside it
_CHUNK = 1 << 17  # weights searched at once: the temporaries stay in the cache
_ROUNDS = 2  # of descent on both scales


@dataclass(frozen=True)
class ProgressiveSpec(Spec):
    """4-bit codes of whole numbers of 8 bits (QServe, arXiv:2405.04532, section 4.1): w = (code - zero) * s1 * s0.

    s0: float16 scale of a row. s1: whole scale of a group, 1 ... 16. zero: of a group, 0 ... 15. (code - zero) * s1
    lies within -127 ... 127 whatever the code, so that a kernel's int8 never overflows.
    """

    group_size: int

    type: ClassVar[str] = "progressive"
    bits: ClassVar[int] = 4
    symmetric: ClassVar[bool] = False
    zero_points: ClassVar[tuple[int, int]] = (0, 15)

    def __post_init__(self) -> None:
        if self.group_size not in PROGRESSIVE_GROUPS:
            raise RecipeError(
                f"progressive grids have groups of {', '.join(map(str, PROGRESSIVE_GROUPS))}, not {self.group_size}",
                "choose one of them",
            )

    @property
    def name(self) -> str:
        return f"progressive-g{self.group_size}"

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight: a float16 for each row, two bytes for each group."""
        return self.bits + 16 / self.group_size + 16 / in_features


@dataclass(frozen=True)
class ProgressiveGrid(Grid):
    """Fitted grid of a matrix [out, in].

    row_scale [out, 1] float32 holding float16 values: s0. multiple [out, groups] and zero [out, groups] float32 whole
    numbers: s1 and the zero point. group_index [in] int64: the group of each input channel.
    """

    spec: ProgressiveSpec
    row_scale: Tensor
    multiple: Tensor
    zero: Tensor
    group_index: Tensor

    by_row: ClassVar[Mapping[str, str | None]] = {"row_scale": None, "multiple": "uint8", "zero": "uint8"}
    shared: ClassVar[Mapping[str, str | None]] = {"group_index": "int32"}

    @property
    def scale(self) -> Tensor:
        """Scale of each group [out, groups]; exact in float32."""
        return self.row_scale * self.multiple

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Least and largest level of each group [out, groups], the protective range kept."""
        return _bounds(self.multiple, self.zero)

    def levels(self, codes: Tensor) -> Tensor:
        return codes.to(torch.float32) - self.zero[:, self.group_index]

    def codes(self, levels: Tensor) -> Tensor:
        return (levels + self.zero[:, self.group_index]).to(torch.uint8)

    def encode(self, weight: Tensor) -> Tensor:
        low, high = (bound[:, self.group_index] for bound in self.bounds)
        return self.codes((weight / self.scale[:, self.group_index]).round_().clamp_(low, high))

    def whole(self, codes: Tensor) -> Tensor:
        """Whole numbers int16 [out, in] of codes, in units of the row's scale: what a kernel has as int8."""
        return (self.levels(codes) * self.multiple[:, self.group_index]).to(torch.int16)

    def decode(self, codes: Tensor) -> Tensor:
        return self.levels(codes) * self.scale[:, self.group_index]

    def refit(self, codes: Tensor, hessian: Tensor, gradient: Tensor, scale_dtype: torch.dtype) -> Coded:
        """Better s0 and s1; rows that would not gain keep theirs.

        s0 has a closed form; each s1 is the whole number nearest to the best, the others held, so that neither raises
        the loss but by rounding s0 to float16. Decoded whole numbers stay within -127 ... 127.
        """
        square, slope = scale_loss(codes, self, hessian, gradient)
        linear = slope + torch.einsum("rgh,rh->rg", square, self.scale)
        most = most_multiples(self._magnitudes(codes))
        diagonal = square.diagonal(dim1=1, dim2=2)
        multiple, scale = self.multiple.clone(), self.row_scale
        for _ in range(_ROUNDS):
            scale = _row_scale(square, linear, multiple, scale)
            product = torch.einsum("rgh,rh->rg", square, multiple)
            for group in range(multiple.shape[1]):
                old, curve = multiple[:, group].clone(), diagonal[:, group]
                wish = old + (linear[:, group] / scale[:, 0] - product[:, group]) / curve.clamp_min(1e-30)
                new = torch.where(curve > 0, torch.minimum(wish.round().clamp_min(1), most[:, group]), old)
                product += square[:, :, group] * (new - old).unsqueeze(1)
                multiple[:, group] = new
        scale = _row_scale(square, linear, multiple, scale)
        better = (gains(square, slope, scale * multiple - self.scale) > 0).unsqueeze(1)
        row_scale = torch.where(better, scale, self.row_scale)
        return Coded(codes, replace(self, row_scale=row_scale, multiple=torch.where(better, multiple, self.multiple)))

    def _magnitudes(self, codes: Tensor) -> Tensor:
        """The largest magnitude of a level in each group [out, groups]."""
        index = self.group_index.expand_as(codes)
        return torch.zeros_like(self.multiple).scatter_reduce_(1, index, self.levels(codes).abs(), "amax")


class Progressive(GridType):
    """Codes of 4 bits of whole numbers of 8 bits."""

    name = "progressive"
    place = 5
    values = "4-bit codes of 8-bit integers as QServe has them, always with zero points"
    pattern = r"progressive-g(\d+)"
    widths = (4,)
    grouped = True
    group_sizes = PROGRESSIVE_GROUPS
    formats = ("qoq",)

    def named(self, found: re.Match[str]) -> Spec:
        return ProgressiveSpec(int(found[1]))

    def spec(self, asked: GridRequest) -> Spec:
        return ProgressiveSpec(integer.resolved(asked))

    def specs(self) -> list[Spec]:
        return [ProgressiveSpec(size) for size in PROGRESSIVE_GROUPS]

    def label(self, asked: GridRequest, inputs: InputSpec | None) -> str:
        return "progressive" if inputs is None else f"progressive-{inputs.name}"

    def fit(self, weight: Tensor, spec: ProgressiveSpec, how: Fitting) -> ProgressiveGrid:
        return fit(weight, spec, clip=how.clip, importance=how.importance, order=how.order)

    def restored(self, spec: ProgressiveSpec, width: int, parts: Mapping[str, Tensor]) -> ProgressiveGrid:
        return ProgressiveGrid(spec, **wide(parts))


GRID = Progressive()


def fit(
    weight: Tensor,
    spec: ProgressiveSpec,
    *,
    clip: Clip = "search",
    importance: Tensor | None = None,
    order: Tensor | None = None,
) -> ProgressiveGrid:
    """Choose both scales and zero points for weight [out, in] float32.

    minmax: the largest weight of a row is 119 s0, and the range of a group covers its weights. search: of several s0
    for a row, each with the s1 and zeros of its groups that lose least, the one that loses least squared error, each
    input channel weighted by importance [in]; then s0 by least squares. Min-max is a candidate, so a search never does
    worse on what it minimises. order [in]: groups are formed of channels in this order instead of the stored one.
    """
    if order is not None:
        permuted = None if importance is None else importance[order]
        grid = fit(weight[:, order], spec, clip=clip, importance=permuted)
        index = torch.empty_like(grid.group_index)
        index[order] = grid.group_index
        return replace(grid, group_index=index)
    width, size = weight.shape[1], spec.group_size
    weigh = torch.ones(width, device=weight.device) if importance is None else importance.to(torch.float32)
    weigh = positive(weigh).view(1, -1, size)
    found = []
    for part in torch.split(weight, max(1, at_once(weight, _CHUNK) // width)):
        block = part.reshape(part.shape[0], -1, size)
        ranges = _covering(block)
        found.append(ranges if clip == "minmax" else _searched(part, block, weigh, ranges))
    row_scale, multiple, zero = (torch.cat(parts) for parts in zip(*found, strict=True))
    return ProgressiveGrid(spec, row_scale, multiple, zero, natural_groups(spec, width).to(weight.device))


def float16_scale(scale: Tensor) -> Tensor:
    """Scales rounded to positive values of float16; float32."""
    return storable(scale, torch.float16)


def most_multiples(levels: Tensor) -> Tensor:
    """The largest s1 that keeps levels of this magnitude, in whole numbers, within 127."""
    return (LARGEST / levels.clamp_min(1)).floor_().clamp_(max=LARGEST_MULTIPLE)


Ranges = tuple[Tensor, Tensor, Tensor]
"""row_scale [rows, 1], multiple [rows, groups], zero [rows, groups]."""


def _bounds(multiple: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    most = (LARGEST / multiple).floor_()
    return -torch.minimum(zero, most), torch.minimum(15 - zero, most)


def _covering(block: Tensor) -> Ranges:
    """Ranges that hold every weight of block [rows, groups, group], and zero."""
    scale = float16_scale(block.abs().amax((1, 2)).unsqueeze(1) / LIMIT)
    low, high = block.amin(-1).clamp_max(0) / scale, block.amax(-1).clamp_min(0) / scale
    multiple = ((high - low) / 15).ceil_().clamp_(1, LARGEST_MULTIPLE)
    return scale, multiple, (-low / multiple).round_().clamp_(0, 15)


def _searched(part: Tensor, block: Tensor, weigh: Tensor, covering: Ranges) -> Ranges:
    """Ranges of part [rows, in], which is block [rows, groups, group] in groups. weigh [1, groups, group]."""
    spec = integer.IntegerSpec(4, block.shape[-1], symmetric=False)
    free = integer.fit(part, spec, clip="search", importance=weigh.flatten())  # as if scales were no multiples
    best = _Best(block, weigh, *covering)
    for factor in (1.0, *_FACTORS):
        tried = float16_scale(covering[0] * factor)
        ratio = free.scale / tried
        candidate = _Best(block, weigh, tried, *_whole(ratio.floor(), ratio * free.zero))
        candidate.offer_groups(*_whole(ratio.ceil(), ratio * free.zero))
        best.offer_rows(candidate)
    for step in (-1, 1):
        best.offer_groups(best.multiple, (best.zero + step).clamp(0, 15))
    for _ in range(2):
        best.offer_rows(_Best(block, weigh, best.refitted(), best.multiple, best.zero))
    return best.scale, best.multiple, best.zero


def _whole(multiple: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
    """s1 in its range and the zero point that reaches as far below zero, in whole numbers of the row."""
    multiple = multiple.clamp(1, LARGEST_MULTIPLE)
    return multiple, (below / multiple).round_().clamp_(0, 15)


class _Best:
    """Ranges of block [rows, groups, group] and what they lose; better ones take their place, earlier ones win ties."""

    def __init__(self, block: Tensor, weigh: Tensor, scale: Tensor, multiple: Tensor, zero: Tensor):
        self.block, self.weigh = block, weigh
        self.scale, self.multiple, self.zero = scale, multiple, zero
        self.loss = self._lost(multiple, zero)

    def offer_groups(self, multiple: Tensor, zero: Tensor) -> None:
        """Take s1 and zero points where they lose less, for the s0 there is."""
        loss = self._lost(multiple, zero)
        better = loss < self.loss
        self.loss = torch.where(better, loss, self.loss)
        self.multiple = torch.where(better, multiple, self.multiple)
        self.zero = torch.where(better, zero, self.zero)

    def offer_rows(self, other: _Best) -> None:
        """Take all of a row where it loses less."""
        better = (other.loss.sum(1) < self.loss.sum(1)).unsqueeze(1)
        self.loss = torch.where(better, other.loss, self.loss)
        self.scale = torch.where(better, other.scale, self.scale)
        self.multiple = torch.where(better, other.multiple, self.multiple)
        self.zero = torch.where(better, other.zero, self.zero)

    def refitted(self) -> Tensor:
        """s0 [rows, 1] by least squares for the codes that there are; the old one where these are all zero."""
        whole = self._levels(self.multiple, self.zero).mul_(self.multiple.unsqueeze(-1))
        weighted = whole * self.weigh
        square, linear = (weighted * whole).sum((1, 2)), (weighted * self.block).sum((1, 2))
        solved = (linear / square.clamp_min(1e-30)).unsqueeze(1)
        return float16_scale(torch.where(solved > 0, solved, self.scale))

    def _levels(self, multiple: Tensor, zero: Tensor) -> Tensor:
        low, high = (bound.unsqueeze(-1) for bound in _bounds(multiple, zero))
        return (self.block / (self.scale * multiple).unsqueeze(-1)).round_().clamp_(low, high)

    def _lost(self, multiple: Tensor, zero: Tensor) -> Tensor:
        """Weighted squared error [rows, groups]."""
        values = self._levels(multiple, zero).mul_((self.scale * multiple).unsqueeze(-1))
        return values.sub_(self.block).square_().mul_(self.weigh).sum(-1)


def _row_scale(square: Tensor, linear: Tensor, multiple: Tensor, scale: Tensor) -> Tensor:
    """s0 [out, 1] by least squares; the old one where it would not be positive."""
    along = (linear * multiple).sum(1, keepdim=True)
    curve = torch.einsum("rg,rgh,rh->r", multiple, square, multiple).unsqueeze(1)
    return float16_scale(torch.where((along > 0) & (curve > 0), along / curve.clamp_min(1e-30), scale))
