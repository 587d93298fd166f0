"""llama-quantize's own choice of codes and scales for IQ1_S and IQ1_M, to the bit.

Weights of a group in ascending order are cut into three at the two places that leave the least error, which gives a
scale and levels; eights that are no point of the table then take the nearest of a few points around them. As in
`compat`, the same float32 operations in the same order for all groups at once, arrays being [position, groups]. Source:
the rules of ggml 0.25, its x86-64 build.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcompress.grids.blocks import BlockSpec
from llmcompress.grids.coded import Coded, Grid
from llmcompress.grids.compat_points import PointTable
from llmcompress.grids.compat_search import Array, F, nearest, total
from llmcompress.workers import Workers

_CHUNK = 1 << 17  # weights encoded at once
_LEVELS = {1: (F(-0.875), F(0.125), F(1.125)), -1: (F(-1.125), F(-0.125), F(0.875))}  # raised, lowered
_SIGNS = {"IQ1_S": ((1,), (-1,)), "IQ1_M": ((1, 1), (1, -1), (-1, 1), (-1, -1))}  # of the parts of a group, as tried
_EMPTY = {"IQ1_S": F(1e-12), "IQ1_M": F(1e-7)}  # a group whose largest magnitude is less counts as zero
_RAISED_D = {"IQ1_S": F(1.125), "IQ1_M": F(1.1125)}


Made = Callable[[Tensor, Tensor, Tensor | None], Grid]
"""A grid of d [out, blocks], multiples [out, groups] and whether groups are raised, where they are as a whole."""


def encode(
    weight: Tensor,
    spec: BlockSpec,
    table: PointTable,
    made: Made,
    workers: Workers,
    importance: Tensor | None = None,
) -> Coded:
    """Codes and scales of weight [out, in] float32 as llama-quantize chooses them.

    importance [in]: mean squares of the inputs; without it, for which IQ1_S has no rule there, squares of the weights
    stand in for what errors cost.
    """
    cost = None if importance is None else importance.detach().cpu().to(torch.float32).numpy()

    def piece(part: Tensor) -> Coded:
        with np.errstate(all="ignore"):
            return _Encoding(part.detach().cpu().numpy(), spec, table, cost).coded(made)

    return Coded.by_rows(weight, _CHUNK, workers, piece).to(weight.device)


class _Encoding:
    """Groups of weight [out, in], as x and weigh [positions, groups]."""

    def __init__(self, weight: Array, spec: BlockSpec, table: PointTable, importance: Array | None) -> None:
        self.spec, self.shape, self.table = spec, weight.shape, table
        size = spec.group_size
        self.x = np.ascontiguousarray(weight.reshape(-1, size).T)
        if importance is None:
            self.weigh = self.x * self.x
        else:
            cost = np.tile(importance.reshape(-1, size).T, (1, len(weight)))
            blocks = weight.reshape(-1, spec.block_size)
            energy = F(2) * np.add.accumulate(blocks * blocks, axis=1)[:, -1] / F(spec.block_size)
            self.weigh = cost * np.sqrt(np.repeat(energy, spec.groups_per_block) + self.x * self.x)
        self.parts = len(_SIGNS[spec.name][0])
        self.units = size // 8

    def coded(self, made: Made) -> Coded:
        scale, digits, signs = self._cut()
        empty = (np.abs(self.x).max(axis=0) < _EMPTY[self.spec.name]) | (signs[0] == 0)
        scale, signs = np.where(empty, F(0), scale), np.where(empty, 1, signs)
        turn = scale < 0
        digits, signs = np.where(turn, 2 - digits, digits), np.where(turn, -signs, signs)
        scale = np.abs(scale)
        by_unit = np.repeat(signs, self.units // self.parts, axis=0)
        digits, moved = self._on_table(digits, scale, by_unit)
        levels = self._levels(digits, by_unit)
        slope, bend = self._sums(levels)
        scale = np.where(moved & ~empty & (slope > 0) & (bend > 0), slope / bend, scale)
        return self._with_scales(scale, digits, signs, empty, made)

    def _cut(self) -> tuple[Array, Array, Array]:
        """The best scale [groups], of either sign, digits 0 to 2 [positions, groups] and signs [parts, groups]."""
        size, groups = self.x.shape
        order = np.argsort(self.x, axis=0, kind="stable")
        cost = np.take_along_axis(self.weigh, order, axis=0)
        energy = cost * np.take_along_axis(self.x, order, axis=0)
        part = order // (size // self.parts)
        slopes, bends = (
            [_prefix(np.where(part == p, item, F(0))) for p in range(self.parts)] for item in (energy, cost)
        )
        best, scale = np.full(groups, np.finfo(F).min), np.abs(self.x).max(axis=0)
        first, second = np.full(groups, -1), np.full(groups, -1)
        signs = np.zeros((self.parts, groups), int)
        slope_of, bend_of = (_halves_slope, _halves_bend) if self.parts > 1 else (_whole_slope, _whole_bend)
        for i in range(size + 1):
            for j in range(i, size + 1):
                sums = {
                    (p, sign): (slope_of(slopes[p], i, j, _LEVELS[sign]), bend_of(bends[p], i, j, _LEVELS[sign]))
                    for p in range(self.parts)
                    for sign in (1, -1)
                }
                for tried in _SIGNS[self.spec.name]:
                    found = [sums[p, sign] for p, sign in enumerate(tried)]
                    slope, bend = found[0] if len(found) == 1 else (a + b for a, b in zip(*found, strict=True))
                    better = (bend > 0) & (slope * slope > best * bend)
                    if not better.any():
                        continue
                    scale = np.where(better, slope / bend, scale)
                    best = np.where(better, scale * slope, best)
                    first, second = np.where(better, i, first), np.where(better, j, second)
                    signs = np.where(better, np.array(tried)[:, None], signs)
        place = np.arange(size)[:, None]
        digits = np.empty((size, groups), int)
        np.put_along_axis(digits, order, (place >= first).astype(int) + (place >= second), axis=0)
        return scale, digits, signs

    def _on_table(self, digits: Array, scale: Array, signs: Array) -> tuple[Array, Array]:
        """Digits of points, and for which groups [groups] some are others. signs [units, groups]."""
        raised, lowered = (np.array(_LEVELS[sign])[None, :, None] for sign in (1, -1))
        values = scale * np.where(signs[:, None] > 0, raised, lowered)
        eights, x, weigh = (item.reshape(self.units, 8, -1) for item in (digits, self.x, self.weigh))
        found, off = self.table.nearest(eights, x, weigh, values)
        moved: Array = np.asarray(off.any(axis=0))
        return found.reshape(digits.shape), moved

    def _levels(self, digits: Array, signs: Array) -> Array:
        """Levels [positions, groups] float32 of digits with signs [units, groups]."""
        by_place = np.repeat(signs, 8, axis=0)
        return np.where(by_place > 0, np.array(_LEVELS[1])[digits], np.array(_LEVELS[-1])[digits])

    def _sums(self, levels: Array) -> tuple[Array, Array]:
        """What a scale of these levels would lower the error by, and the curve of that."""
        both = self.weigh * levels
        return total(both * self.x), total(both * levels)

    def _with_scales(self, scale: Array, digits: Array, signs: Array, empty: Array, made: Made) -> Coded:
        """Scales rounded to multiples; groups that are empty have the first point of the table."""
        per = self.spec.groups_per_block
        blocks = scale.reshape(-1, per)
        largest = blocks.max(axis=1)
        none = largest == 0
        d = largest / F(15)
        multiples = np.clip(nearest(F(0.5) * ((F(1) / d)[:, None] * blocks - F(1))), 0, 7)
        multiples = 2 * np.where(none[:, None], F(0), multiples) + 1
        digits = np.where(empty, self.table.digits[0][np.arange(len(digits)) % 8][:, None], digits)
        signs = np.where(np.repeat(none, per), 1, signs)
        by_unit = np.repeat(signs, self.units // self.parts, axis=0)
        if self.parts > 1:
            slope, bend = self._sums_of_blocks(self._levels(digits, by_unit) * multiples.reshape(-1))
            d = np.where(bend > 0, slope / bend, d)
        d = np.where(none, F(0), d * _RAISED_D[self.spec.name])
        rows, width = self.shape
        raised = np.repeat(by_unit > 0, 8, axis=0)
        codes = torch.from_numpy(np.ascontiguousarray((2 * digits + raised).T.astype(np.uint8)).reshape(rows, width))
        half = np.clip(d, F(-65504), F(65504)).astype(np.float16).astype(F)
        shared = torch.from_numpy((signs[0] > 0).astype(F).reshape(rows, -1)) if self.parts == 1 else None
        units, whole = (torch.from_numpy(np.ascontiguousarray(item, F).reshape(rows, -1)) for item in (half, multiples))
        return Coded(codes, made(units, whole, shared))

    def _sums_of_blocks(self, levels: Array) -> tuple[Array, Array]:
        """`_sums` of whole blocks, one position after another."""
        both = self.weigh * levels
        found = []
        for item in (both * self.x, both * levels):
            found.append(total(np.ascontiguousarray(item.T.reshape(-1, self.spec.block_size).T)))
        return found[0], found[1]


def _prefix(values: Array) -> Array:
    """Sums of the first 0, 1, ... positions, [positions + 1, groups]."""
    return np.concatenate([np.zeros_like(values[:1]), np.add.accumulate(values, axis=0)])


def _whole_slope(sums: Array, i: int, j: int, levels: tuple[Any, ...]) -> Array:
    low, middle, high = levels
    found: Array = sums[i] * low + (sums[j] - sums[i]) * middle + (sums[-1] - sums[j]) * high
    return found


def _whole_bend(sums: Array, i: int, j: int, levels: tuple[Any, ...]) -> Array:
    low, middle, high = levels
    found: Array = sums[i] * low * low + (sums[j] - sums[i]) * middle * middle + (sums[-1] - sums[j]) * high * high
    return found


def _halves_slope(sums: Array, i: int, j: int, levels: tuple[Any, ...]) -> Array:
    """The same, since levels are one apart."""
    found: Array = sums[-1] * levels[2] - (sums[i] + sums[j])
    return found


def _halves_bend(sums: Array, i: int, j: int, levels: tuple[Any, ...]) -> Array:
    low, middle, high = levels
    found: Array = (
        sums[-1] * high * high + sums[i] * (low * low - middle * middle) + sums[j] * (middle * middle - high * high)
    )
    return found
