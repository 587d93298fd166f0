"""Least-squares fits of block grids on one chunk of blocks.

Arrays are float32 laid out for vector units: weights [groups per block, group size, blocks], what belongs to a group
[groups per block, blocks], to a block [blocks]. A weight is modelled as scale * level - minimum; levels are what codes
stand for, whole numbers or the sixteen of IQ4. Types with one group per block are those whose multiples are all one.
Errors are weighted sums of squares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from llmcompress.grids.blocks import IQ4_LEVELS, BlockSpec
from llmcompress.grids.scales import between, float16

TINY = 1e-30  # keeps sums that are zero from being divided by
_RIDGE = 4e-6  # levels that are all the same leave a determinant of rounding errors
_HALVES = 255  # the levels of IQ4 lie within +-127.5


class Affine(NamedTuple):
    """Scale and what is subtracted, or None, of each group [groups per block, blocks]."""

    scale: Tensor
    least: Tensor | None


class Sums(NamedTuple):
    """Weighted sums over groups [..., groups per block, blocks] of levels times weights, levels squared, levels.

    level is None for types without minima.
    """

    along: Tensor
    square: Tensor
    level: Tensor | None


class Chunk:
    """Blocks `x` with weights `w` [groups per block, group size, blocks] and room for what is computed of them."""

    def __init__(self, spec: BlockSpec, x: Tensor, w: Tensor) -> None:
        self.spec, self.x, self.w = spec, x, w
        self.wx = w * x
        self.w_sum, self.x_sum = w.sum(1), self.wx.sum(1)
        self._levels, self._room, self._moved = (torch.empty_like(x) for _ in range(3))
        self._low, self._high = float(spec.lowest - spec.middle), float(spec.levels - 1 - spec.middle)
        if spec.curved:
            levels = torch.tensor(IQ4_LEVELS, dtype=torch.float32, device=x.device)
            halves = torch.arange(-_HALVES, _HALVES + 1, device=x.device) / 2  # hold every midpoint
            self._codes = torch.bucketize(halves, between(levels), right=True)
            self._nearest = levels[self._codes]
            self._index = torch.empty_like(x, dtype=torch.int64)

    def _snap(self, units: Tensor) -> Tensor:
        """Nearest levels of values in units of the scale, in place."""
        if not self.spec.curved:
            return units.round_().clamp_(self._low, self._high)
        self._index.copy_(units.mul_(2).floor_().clamp_(-_HALVES, _HALVES).add_(_HALVES))
        return torch.gather(self._nearest.expand(*units.shape[:2], -1), 2, self._index, out=units)

    def scaled(self, values: Tensor, factor: Tensor | float) -> Tensor:
        """Nearest levels of values times a number, or one for each group; the next call writes over them."""
        number = factor if isinstance(factor, float) else factor.unsqueeze(1)
        return self._snap(torch.mul(values, number, out=self._levels))

    def moved(self, least: Tensor | None) -> Tensor:
        """The blocks with minima added; the next call writes over them."""
        return self.x if least is None else torch.add(self.x, least.unsqueeze(1), out=self._moved)

    def levels(self, fit: Affine) -> Tensor:
        """Nearest levels under a fit; the next call writes over them."""
        return self.scaled(self.moved(fit.least), reciprocal(fit.scale))

    def codes(self, fit: Affine) -> Tensor:
        """Codes uint8 [blocks, block size] of the nearest levels under a fit."""
        levels = self.levels(fit)
        found = self._codes[self._index] if self.spec.curved else levels.add_(self.spec.middle)
        return found.to(torch.uint8).view(self.spec.block_size, -1).t().contiguous()

    def error(self, values: Tensor, scale: Tensor, inverse: Tensor, out: Tensor | None = None) -> Tensor:
        """Weighted squared error of each group, codes being the nearest to `values`, what `moved` gave."""
        off = self.scaled(values, inverse).mul_(scale.unsqueeze(1)).sub_(values)
        return torch.sum(off.mul_(off).mul_(self.w), 1, out=out)

    def sums(self, levels: Tensor, out: Tensor | None = None) -> Sums:
        """Sums over groups; `out` [3, groups per block, blocks] takes them."""
        out = torch.empty(3, *self.w_sum.shape, device=levels.device) if out is None else out
        torch.sum(torch.mul(self.wx, levels, out=self._room), 1, out=out[0])
        heavy = torch.mul(self.w, levels, out=self._room)
        if self.spec.minima:
            torch.sum(heavy, 1, out=out[2])
        torch.sum(heavy.mul_(levels), 1, out=out[1])
        return Sums(out[0], out[1], out[2] if self.spec.minima else None)

    def solve(self, sums: Sums) -> tuple[Affine, Tensor]:
        """Scale and minimum that fit levels best, and how much error they take away from that of zero."""
        square = sums.square.clamp_min(TINY)
        if sums.level is None:
            scale = sums.along / square
            return Affine(scale, None), scale * sums.along
        determinant = self.w_sum * square * (1 + _RIDGE) - sums.level * sums.level
        least = (sums.level * sums.along - self.x_sum * square) / determinant.clamp_min_(TINY)
        along = sums.along + (least.clamp_min_(0) if self.spec.multiples else least) * sums.level
        scale = along / square
        if self.spec.multiples is not None:  # multiples are not negative
            scale.clamp_min_(0)
        gain = scale * (2 * along - scale * square) - least * (2 * self.x_sum + least * self.w_sum)
        return Affine(scale, least), gain


def reciprocal(value: Tensor) -> Tensor:
    """1 / value, zero where that is out of range."""
    return value.reciprocal().masked_fill_(value.abs() < TINY, 0.0)


class Trial(NamedTuple):
    """An inverse scale to try: numerator / extent. The range of types with minima begins at `start` times its least."""

    numerator: float
    start: float = 1.0


def fit_groups(chunk: Chunk, trials: Sequence[Trial]) -> tuple[Affine, Sums]:
    """Scale and minimum of each group on its own, and the sums for the levels that they fit.

    The extent is the range of a group (from zero, where minima are not negative), or its entry of largest magnitude for
    types without minima. The best trial's fit chooses levels once more, which never makes a group worse.
    """
    x, shape = chunk.x, chunk.w_sum.shape
    low, high = x.amin(1), x.amax(1)
    low = low.clamp_max_(0) if chunk.spec.multiples is not None else low
    room = torch.empty(3, len(trials), *shape, device=x.device)
    start, values = None, x
    for place, trial in enumerate(trials):
        if not chunk.spec.minima and start is None:
            values = x * reciprocal(torch.where(-low > high, low, high)).unsqueeze(1)
        elif chunk.spec.minima and start != trial.start:
            begin = low * trial.start
            values = (x - begin.unsqueeze(1)).mul_(reciprocal(high - begin).unsqueeze(1))
        start = trial.start
        chunk.sums(chunk.scaled(values, trial.numerator), room[:, place])
    fits, gain = chunk.solve(Sums(room[0], room[1], room[2] if chunk.spec.minima else None))
    best = gain.max(0, keepdim=True).indices
    least = None if fits.least is None else fits.least.gather(0, best)[0]
    fit = Affine(fits.scale.gather(0, best)[0], least)
    sums = chunk.sums(chunk.levels(fit))
    return chunk.solve(sums)[0], sums


@dataclass
class BlockParameters:
    """What a block stores: d, dmin [blocks] (float16 values) and multiples, minima [groups per block, blocks].

    Multiples and minima of types that store none are all one.
    """

    d: Tensor
    multiples: Tensor
    dmin: Tensor | None = None
    minima: Tensor | None = None

    @property
    def affine(self) -> Affine:
        least = None if self.dmin is None or self.minima is None else self.dmin * self.minima
        return Affine(self.d * self.multiples, least)

    def where(self, mask: Tensor, other: "BlockParameters") -> "BlockParameters":
        """This where mask [blocks] is set, the other elsewhere."""

        def pick(mine: Tensor | None, theirs: Tensor | None) -> Tensor | None:
            return None if mine is None or theirs is None else torch.where(mask, mine, theirs)

        d, multiples = torch.where(mask, self.d, other.d), torch.where(mask, self.multiples, other.multiples)
        return BlockParameters(d, multiples, pick(self.dmin, other.dmin), pick(self.minima, other.minima))


def round_groups(chunk: Chunk, fit: Affine, sums: Sums, steps: Sequence[float]) -> BlockParameters:
    """Round the scales and minima of groups to multiples of a unit per block.

    The cost of moving a scale is the curvature of the error for the levels that `sums` are of; minima are fitted to
    the scales as they were rounded.
    """
    if chunk.spec.multiples is None:
        ones = torch.ones_like(fit.scale)
        dmin = None if fit.least is None else float16(fit.least[0])
        return BlockParameters(float16(fit.scale[0]), ones, dmin, None if dmin is None else ones)
    if fit.least is None or sums.level is None:
        return BlockParameters(*_round(fit.scale, sums.square, chunk.spec.multiples, steps))
    weights = chunk.w_sum.clamp_min(TINY)
    curvature = sums.square - (fit.least > 0) * (sums.level * sums.level / weights)  # minima make up for some of it
    curvature = torch.maximum(curvature, 1e-3 * sums.square)
    d, multiples = _round(fit.scale, curvature, chunk.spec.multiples, steps)
    least = ((d * multiples * sums.level - chunk.x_sum) / weights).clamp_min_(0)
    return BlockParameters(d, multiples, *_round(least, weights, chunk.spec.multiples, steps))


def _round(value: Tensor, curvature: Tensor, within: tuple[int, int], steps: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Unit [blocks] and multiples of value [groups per block, blocks] that lose least, of several units tried.

    Each unit makes the extreme value a multiple that is a step beyond the last one; then it is fitted to its multiples.
    """
    least, most = within
    low, high = value.amin(0), value.amax(0)
    ends = torch.tensor(steps, device=value.device).add_(most if least == 0 else -least)
    extreme = torch.where(-low > high, low, high) * (1.0 if least == 0 else -1.0)
    tried = float16(extreme / ends.view(-1, 1, 1))  # [steps, 1, blocks]
    whole = (value * reciprocal(tried)).round_().clamp_(least, most)
    heavy = curvature * whole
    square = (heavy * whole).sum(1, keepdim=True).clamp_min_(TINY)
    fitted = float16((heavy * value).sum(1, keepdim=True) / square)
    best = (value - fitted * whole).square_().mul_(curvature).sum(1, keepdim=True).min(0, keepdim=True).indices
    return fitted.gather(0, best)[0, 0], whole.gather(0, best.expand(1, *value.shape))[0]
