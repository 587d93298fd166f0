"""The searches that GGML's quantisers share, to the bit, for many groups at once.

Arrays are float32 [positions, groups], results [groups]. Each search keeps the best so far, and the first of equals.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from llmcompress.grids.blocks import IQ4_LEVELS

Array = npt.NDArray[Any]

F = np.float32
_EMPTY = F(1e-15)  # a group whose largest magnitude is less counts as zero
_SWEEPS = 5


def total(values: Array) -> Array:
    """Sums over positions, one after another: another order rounds otherwise."""
    summed: Array = values[0].copy()
    for row in values[1:]:
        summed += row
    return summed


def nearest(values: Array) -> Array:
    """Whole numbers, ties to even."""
    rounded: Array = np.rint(values)
    return rounded


def inverse(values: Array) -> Array:
    """1 / value, zero where it is zero."""
    return np.where(values == 0, F(0), F(1) / values)


def extreme(x: Array) -> Array:
    """The entry of largest magnitude of each group with its sign; the first of equals, zero for zeros."""
    found: Array = np.zeros_like(x[0])
    for row in x:
        np.copyto(found, row, where=np.abs(row) > np.abs(found))
    return found


def lowest(x: Array) -> Array:
    """The least entry of each group, at most zero; the first of equals."""
    found: Array = x[0].copy()
    for row in x[1:]:
        np.copyto(found, row, where=row < found)
    return np.where(found > 0, F(0), found)


def symmetric(x: Array, weights: Array, half: int) -> tuple[Array, Array]:
    """Codes 0 ... 2 half - 1 and the scale, of either sign, for x ~ scale * (code - half) under weights.

    Codes belong to the inverse scale tried, not to the scale that fits them best.
    """
    largest = extreme(x)
    empty = np.abs(largest) < _EMPTY
    weighted = weights * x

    def attempt(numerator: Any) -> tuple[Array, Array, Array]:
        codes = np.clip(nearest((-numerator / largest) * x), -half, half - 1)
        return codes, total(weighted * codes), total((weights * codes) * codes)

    codes, along, square = attempt(F(half))
    scale = np.where(square != 0, along / square, F(0))
    best = scale * along
    for step in range(-9, 10):
        if step == 0:
            continue
        tried, along, square = attempt(F(half) + F(0.1) * F(step))
        better = (square > 0) & (along * along > best * square)
        fitted = along / square
        np.copyto(codes, tried, where=better)
        np.copyto(scale, fitted, where=better)
        np.copyto(best, fitted * along, where=better)
    return np.where(empty, F(0), codes + F(half)), np.where(empty, F(0), scale)


def coordinate(x: Array, weights: Array, half: int) -> tuple[Array, Array]:
    """As `symmetric`, from one start by moving one code after another to where it fits best."""
    largest = extreme(x)
    empty = np.abs(largest) < _EMPTY
    codes = np.clip(nearest((F(-half) / largest) * x), -half, half - 1)
    codes[:, empty] = 0
    scale = _improve(x, weights, codes, -half, half - 1, signed=True)
    return np.where(empty, F(0), codes + F(half)), np.where(empty, F(0), scale)


def _improve(x: Array, weights: Array, codes: Array, least: int, most: int, *, signed: bool) -> Array:
    """Move codes one by one, in place, while the fit improves; returns the best scale."""
    along, square = total((weights * x) * codes), total((weights * codes) * codes)
    for _ in range(_SWEEPS):
        changed = False
        for w, value, code in zip(weights, x, codes, strict=True):
            others = along - (w * value) * code
            others_square = square - (w * code) * code
            moved = np.clip(nearest((value * others_square) / others), least, most)
            usable = (others > 0) & (moved != code)
            if not signed:
                usable &= others_square > 0
            others += (w * value) * moved
            others_square += (w * moved) * moved
            better = usable & (others_square > 0) & ((others * others) * square > (along * along) * others_square)
            np.copyto(code, moved, where=better)
            np.copyto(along, others, where=better)
            np.copyto(square, others_square, where=better)
            changed |= bool(better.any())
        if not changed:
            break
    return np.where(square > 0, along / square, F(0))


def asymmetric(
    x: Array, weights: Array, top: int, first: float, step: float, count: int, *, absolute: bool = False
) -> tuple[Array, Array, Array]:
    """Codes 0 ... top, the scale >= 0 and the least value's negative >= 0: x ~ scale * code - least.

    Tries inverse scales (top + first + step * k) / range for k = 0 ... count. The range begins at the least value found
    so far, so that each trial depends on those before it. absolute: errors count by magnitude, not squared.
    """
    low, high = lowest(x), x.max(axis=0)
    flat = high <= low
    weighted = weights * x
    weight_sum, x_sum = total(weights), total(weighted)

    def coded(numerator: Any) -> Array:
        return np.clip(nearest((numerator / (high - low)) * (x - low)), 0, top)

    def error(codes: Array, unit: Array, least: Array) -> Array:
        off = ((unit * codes) + least) - x
        return total(weights * (np.abs(off) if absolute else off * off))

    scale = F(1) / (F(top) / (high - low))
    codes = coded(F(top))
    best = error(codes, scale, low)
    for k in range(count + 1):
        tried = coded((F(first) + F(step) * F(k)) + F(top))
        heavy = weights * tried
        one, two, along = total(heavy), total(heavy * tried), total(heavy * x)
        determinant = weight_sum * two - one * one
        unit = (weight_sum * along - x_sum * one) / determinant
        least = (two * x_sum - one * along) / determinant
        above = least > 0
        least = np.where(above, F(0), least)
        unit = np.where(above, along / two, unit)
        loss = error(tried, unit, least)
        better = (determinant > 0) & (loss < best)
        np.copyto(codes, tried, where=better)
        np.copyto(scale, unit, where=better)
        np.copyto(low, least, where=better)
        np.copyto(best, loss, where=better)
    return np.where(flat, F(0), codes), np.where(flat, F(0), scale), -low


def positive(x: Array, most: int, weights: Array) -> tuple[Array, Array]:
    """Unit and multiples 0 ... most of x [groups per block, blocks] >= 0 under weights."""
    largest = np.maximum(x.max(axis=0), F(0))
    empty = largest < _EMPTY

    def error(per_unit: Array) -> Array:
        off = x - (F(1) / per_unit) * np.minimum(nearest(per_unit * x), most)
        return total((weights * off) * off)

    per_unit = F(most) / largest
    best = error(per_unit)
    for step in range(-4, 5):
        if step == 0:
            continue
        tried = (F(0.1) * F(step) + F(most)) / largest
        loss = error(tried)
        better = loss < best
        np.copyto(per_unit, tried, where=better)
        np.copyto(best, loss, where=better)
    multiples = np.minimum(nearest(per_unit * x), most)
    multiples[:, empty] = 0
    unit = _improve(x, weights, multiples, 0, most, signed=False)
    return np.where(empty, F(0), unit), multiples


_LEVELS = np.array(IQ4_LEVELS, F)
_HALVES = np.arange(-255, 256) / 2  # every midpoint between levels is among them
_CODES = np.searchsorted((_LEVELS[1:] + _LEVELS[:-1]) / 2, _HALVES, side="right").astype(np.uint8)


def curved_codes(units: Array) -> Array:
    """Codes of the nearest levels of IQ4; halfway goes up."""
    halves = np.clip(np.floor(units * F(2)), -255, 255)
    codes: Array = _CODES[halves.astype(np.int16) + np.int16(255)]
    return codes


def curved(x: Array, weights: Array) -> Array:
    """Scales for the levels of IQ4, of either sign."""
    largest = extreme(x)
    empty = np.abs(largest) < _EMPTY

    def attempt(per_unit: Array) -> tuple[Array, Array]:
        level = _LEVELS[curved_codes(per_unit * x)]
        heavy = weights * level
        return total(heavy * x), total(heavy * level)

    along, square = attempt(F(1) / (-largest / _LEVELS[0]))
    scale = along / square
    best = scale * along
    for step in range(-7, 8):
        along, square = attempt((F(step) + _LEVELS[0]) / largest)
        better = (square > 0) & (along * along > best * square)
        fitted = along / square
        np.copyto(scale, fitted, where=better)
        np.copyto(best, fitted * along, where=better)
    return np.where(empty, F(0), scale)
