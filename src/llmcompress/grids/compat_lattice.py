"""llama-quantize's own choice of codes and scales for types of points of a table, IQ2_XXS to IQ3_S, to the bit.

Scales of a group are tried one after another; each weight takes its nearest level, and eights (or fours) that are no
point of the table the nearest of a few points around them. As in `compat`, the same float32 operations in the same
order for all groups at once, arrays being [position, groups]. Source: the rules of ggml 0.25, its x86-64 build. One
thing is done otherwise: behind a group of IQ3_S that is all zero, llama-quantize writes codes to the wrong places.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmcompress.grids.blocks import BlockSpec
from llmcompress.grids.coded import Coded, Grid
from llmcompress.grids.compat_points import PointTable
from llmcompress.grids.compat_search import Array, F, nearest, total
from llmcompress.workers import Workers

_CHUNK = 1 << 17  # weights encoded at once
_SINGLE, _QUAD = F(0.1), F(0.2)  # of a level, between scales that are tried
_COARSE = 4  # steps of the first scale of IQ2_XXS
_SWEEPS = 5


@dataclass(frozen=True)
class Rule:
    """What differs between types. trials, step: how far up and down, and how finely, the largest level is tried.

    distances: as in `PointTable.of`. energy: how often the mean square of a block counts in what an error costs. least:
    a group whose largest magnitude is less counts as zero. widened: what d is multiplied by when it is stored. again:
    the units whose points are chosen anew at the end: all, those that had none, or all of a group that has such.
    """

    trials: int
    step: F
    distances: int
    energy: int
    least: float
    widened: float
    again: str


RULES: Mapping[str, Rule] = {
    "IQ2_XXS": Rule(6, _SINGLE, 2, 1, 1e-15, 1, "all"),
    "IQ2_XS": Rule(9, _SINGLE, 2, 1, 1e-15, 1, "own"),
    "IQ2_S": Rule(9, _SINGLE, 1, 2, 1e-8, 0.9875, "own"),
    "IQ3_XXS": Rule(15, _QUAD, 2, 2, 1e-8, 1.0125, "own"),
    "IQ3_S": Rule(9, _QUAD, 3, 2, 1e-45, 1.033, "group"),
}

Made = Callable[[Tensor, Tensor], Grid]
"""A grid of d [out, blocks] and multiples [out, groups]."""


def encode(
    weight: Tensor,
    spec: BlockSpec,
    table: PointTable,
    even: bool,
    made: Made,
    workers: Workers,
    importance: Tensor | None = None,
) -> Coded:
    """Codes and scales of weight [out, in] float32 as llama-quantize chooses them.

    even: whether eight weights have an even number of minus signs. importance [in]: mean squares of the inputs; types
    of two bits need it there, and without it all inputs count alike.
    """
    cost = None if importance is None else importance.detach().cpu().to(torch.float32).numpy()

    def piece(part: Tensor) -> Coded:
        with np.errstate(all="ignore"):
            return _Encoding(part.detach().cpu().numpy(), spec, table, even, cost).coded(made)

    return Coded.by_rows(weight, _CHUNK, workers, piece).to(weight.device)


class _Encoding:
    """Groups of weight [out, in], as magnitudes x and weigh [positions, groups]; one of eight x may be negative."""

    def __init__(self, weight: Array, spec: BlockSpec, table: PointTable, even: bool, importance: Array | None) -> None:
        self.spec, self.shape, self.table, self.rule, self.even = spec, weight.shape, table, RULES[spec.name], even
        self.levels = (2 * np.arange(table.base) + 1).astype(F)  # in units of the scale while it is searched for
        size = spec.group_size
        signed = np.ascontiguousarray(weight.reshape(-1, size).T)
        self.weigh = self._weighed(signed, weight, importance)
        minus = signed < 0
        if even:
            eights = minus.reshape(-1, 8, minus.shape[-1]).copy()
            flipped = np.argmin((self.weigh * signed * signed).reshape(eights.shape), axis=1)[:, None]
            odd = (eights.sum(axis=1) % 2 == 1)[:, None]
            np.put_along_axis(eights, flipped, np.take_along_axis(eights, flipped, 1) ^ odd, 1)
            minus = eights.reshape(signed.shape)
        self.minus = minus
        self.x = np.where(self.minus, -signed, signed)

    def _weighed(self, signed: Array, weight: Array, importance: Array | None) -> Array:
        """What a squared error costs, as `signed` [positions, groups]."""
        square: Array = signed * signed
        if importance is None and self.table.unit == 4:
            return square
        blocks = weight.reshape(-1, self.spec.block_size)
        energy = F(self.rule.energy) * np.add.accumulate(blocks * blocks, axis=1)[:, -1] / F(self.spec.block_size)
        spread: Array = np.repeat(energy, self.spec.groups_per_block)
        if importance is None and not self.even:
            return np.add(F(0.25) * spread, square)
        cost: Array = np.sqrt(spread + square)
        if importance is not None:
            cost = np.tile(importance.reshape(-1, self.spec.group_size).T, (1, len(weight))) * cost
        return cost

    def _units(self, values: Array) -> Array:
        return values.reshape(-1, self.table.unit, values.shape[-1])

    def coded(self, made: Made) -> Coded:
        largest = self.x.max(axis=0)
        empty = largest < F(self.rule.least)
        if self.spec.name == "IQ2_XXS":
            scale = self._coarse(largest)
            most = scale * F(3)
            empty |= most <= 0
        else:
            scale, most = largest / self.levels[-1], largest
        scale, digits, off = self._tried(scale, most)
        scale, digits = self._again(scale, digits, off)
        turned = scale < 0
        minus = self.minus ^ turned
        scale = np.where(empty, F(0), np.abs(scale))
        none = scale.reshape(-1, self.spec.groups_per_block).max(axis=1) == 0
        blank = empty | np.repeat(none, self.spec.groups_per_block)
        first = np.tile(self.table.digits[0], len(digits) // self.table.unit)[:, None]
        return self._with_scales(scale, none, np.where(blank, first, digits), minus & ~blank, made)

    def _coarse(self, largest: Array) -> Array:
        """The scale of levels 0 to 4; a negative level is one of 8 bits without a sign, as it is there."""
        x, weigh = self.x, self.weigh
        per_unit = F(_COARSE) / largest
        off = x - (F(1) / per_unit) * (nearest(per_unit * x) % F(256))
        best = total(weigh * off * off)
        for step in (-4, -3, -2, -1, 1, 2, 3, 4):
            tried = (F(0.1) * F(step) + F(_COARSE)) / largest
            off = x - (F(1) / tried) * np.minimum(nearest(tried * x), _COARSE)
            loss = total(weigh * off * off)
            better = loss < best
            per_unit, best = np.where(better, tried, per_unit), np.where(better, loss, best)
        codes = np.minimum(nearest(per_unit * x), F(_COARSE))
        along, square = total(weigh * x * codes), total(weigh * codes * codes)
        codes = codes % F(256)
        for _ in range(_SWEEPS):
            changed = False
            for w, value, code in zip(weigh, x, codes, strict=True):
                others, others_square = along - w * value * code, square - w * code * code
                usable = (others > 0) & (others_square > 0)
                moved = np.minimum(nearest(value * others_square / others), F(_COARSE))
                others, others_square = others + w * value * moved, others_square + w * moved * moved
                better = usable & (moved != code) & (others * others * square > along * along * others_square)
                np.copyto(code, moved % F(256), where=better)
                along, square = np.where(better, others, along), np.where(better, others_square, square)
                changed |= bool(better.any())
            if not changed:
                break
        return np.where(square > 0, along / square, F(0))

    def _tried(self, scale: Array, most: Array) -> tuple[Array, Array, Array]:
        """The best scale [groups] of all that are tried, its digits, and which units [units, groups] had no point."""
        best = np.zeros_like(scale)
        digits = np.zeros(self.x.shape, int)
        off = np.full((len(self.x) // self.table.unit, len(scale)), self.rule.again == "group")
        cost = self._units(np.sqrt(self.weigh))
        for step in range(-self.rule.trials, self.rule.trials + 1):
            per_unit = (self.levels[-1] + F(step) * self.rule.step) / most
            found, missed = self._points(per_unit, F(1) / per_unit, cost)
            slope, bend = self._sums(found)
            better = (bend > 0) & (slope * slope > best * bend)
            scale = np.where(better, slope / bend, scale)
            best = np.where(better, scale * slope, best)
            digits, off = np.where(better, found, digits), np.where(better, missed, off)
        return scale, digits, off

    def _again(self, scale: Array, digits: Array, off: Array) -> tuple[Array, Array]:
        """Points chosen anew for the scale found, of the units that the rule says; then the scale that fits them."""
        units = {"all": np.ones_like(off), "own": off, "group": np.broadcast_to(off.any(axis=0), off.shape)}
        which = units[self.rule.again] & (scale > 0)
        found, _ = self._points(F(1) / scale, scale, self._units(np.sqrt(self.weigh)))
        digits = np.where(np.repeat(which, self.table.unit, axis=0), found, digits)
        slope, bend = self._sums(digits)
        return np.where(which.any(axis=0) & (bend > 0), slope / bend, scale), digits

    def _points(self, per_unit: Array, scale: Array, cost: Array) -> tuple[Array, Array]:
        last = len(self.levels) - 1
        digits = np.nan_to_num(np.clip(nearest(F(0.5) * (per_unit * self.x - F(1))), 0, last)).astype(int)
        values = np.broadcast_to(scale * self.levels[:, None], (len(cost), len(self.levels), len(scale)))
        found, off = self.table.nearest(self._units(digits), self._units(self.x), cost, values)
        return found.reshape(digits.shape), off

    def _sums(self, digits: Array) -> tuple[Array, Array]:
        """What a scale of these digits would lower the error by, and the curve of that."""
        levels = self.levels[digits]
        return total(self.weigh * self.x * levels), total(self.weigh * levels * levels)

    def _with_scales(self, scale: Array, none: Array, digits: Array, minus: Array, made: Made) -> Coded:
        blocks = scale.reshape(len(none), -1)
        d = blocks.max(axis=1) / F(31)
        multiples = np.clip(nearest(F(0.5) * ((F(1) / d)[:, None] * blocks - F(1))), 0, 15)
        multiples = 2 * np.where(none[:, None], F(0), multiples) + 1
        rows, width = self.shape
        base = len(self.levels)
        codes = np.where(minus, base - 1 - digits, base + digits).T.astype(np.uint8)
        half = np.clip(d * F(self.rule.widened), F(-65504), F(65504)).astype(np.float16).astype(F)
        units, whole = (torch.from_numpy(np.ascontiguousarray(item, F).reshape(rows, -1)) for item in (half, multiples))
        kept = torch.from_numpy(np.ascontiguousarray(codes)).reshape(rows, width)
        return Coded(kept, made(units, whole))
