"""llama-quantize's own choice of codes and scales for every block type, to the bit.

The same float32 operations in the same order as GGML's quantisers, for all groups of a matrix at once: arrays are
[position in the group, groups], sums run over positions one after another. Searches are in `compat_search`; here is how
each type weighs its values and rounds the scales of a super-block. Source: the rules of ggml 0.25, its x86-64 build.

This is the yardstick for `search`, and the way to files that are byte for byte what llama-quantize writes.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llmcompress.grids.blocks import BlockGrid, BlockSpec
from llmcompress.grids.coded import Coded
from llmcompress.grids.compat_search import (
    Array,
    asymmetric,
    coordinate,
    curved,
    curved_codes,
    extreme,
    inverse,
    nearest,
    positive,
    symmetric,
    total,
)
from llmcompress.workers import Workers

F = np.float32
_CHUNK = 1 << 17  # weights encoded at once
_MIN_RANGES = {  # inverse scales tried around (levels - 1) / range without importance: first, step, how many
    "Q2_K": (-0.5, 0.1, 15),
    "Q4_K": (-1.0, 0.1, 20),
    "Q5_K": (-0.5, 0.1, 15),
}
_WEIGHTED_RANGE = (-0.9, 0.05, 36)


class CompatFit(NamedTuple):
    """Codes [positions, groups] and what BlockGrid holds, per block or group."""

    codes: Array
    d: Array
    multiples: Array | None = None
    dmin: Array | None = None
    minima: Array | None = None


def encode(weight: Tensor, spec: BlockSpec, workers: Workers, importance: Tensor | None = None) -> Coded:
    """Codes and scales of weight [out, in] float32 as llama-quantize chooses them.

    importance [in]: mean squares of the inputs, an importance matrix's entries. Codes are those that are stored, which
    for the types of 32 are not always the nearest for the scale that is stored.
    """
    importance_row = None if importance is None else importance.detach().cpu().to(torch.float32).numpy()

    def piece(part: Tensor) -> Coded:
        return _encode(part.detach().cpu().numpy(), spec, importance_row)

    return Coded.by_rows(weight, _CHUNK, workers, piece).to(weight.device)


def _encode(weight: Array, spec: BlockSpec, importance: Array | None) -> Coded:
    rows, width = weight.shape
    x = np.ascontiguousarray(weight.reshape(-1, spec.group_size).T)
    weigh = _Weights(weight, x, spec, importance)
    with np.errstate(all="ignore"):
        if spec.curved:
            fitted = _curved(x, weigh, spec)
        elif spec.multiples is None:
            fitted = _single(weight, x, weigh, spec)
        elif spec.minima:
            fitted = _with_minima(x, weigh, spec)
        else:
            fitted = _with_signs(x, weigh, spec)

    def shaped(value: Array | None) -> Any:
        return None if value is None else torch.from_numpy(np.ascontiguousarray(value, F).reshape(rows, -1))

    codes = torch.from_numpy(np.ascontiguousarray(fitted.codes.T.astype(np.uint8)).reshape(rows, width))
    return Coded(codes, BlockGrid(spec, *(shaped(value) for value in fitted[1:])))


class _Weights:
    """What the errors of x [positions, groups] count; `importance` None where none was given."""

    def __init__(self, weight: Array, x: Array, spec: BlockSpec, importance: Array | None):
        self.weight, self.x, self.spec = weight, x, spec
        self.importance: Array | None = None
        if importance is not None:
            per_group = importance.reshape(-1, spec.group_size).T
            self.importance = np.ascontiguousarray(np.tile(per_group, (1, weight.shape[0])))

    def with_energy(self, factor: float) -> Array:
        """importance * sqrt(factor * mean square + x^2), the mean over a block, or over the row for the types of 32."""
        assert self.importance is not None
        by_row = self.spec.multiples is None and not self.spec.curved
        span = self.weight.shape[1] if by_row else self.spec.block_size
        squares = self.weight.reshape(-1, span)
        energy = np.add.accumulate(squares * squares, axis=1)[:, -1]
        mean = (F(factor) * energy) / F(span)
        out: Array = self.importance * np.sqrt(np.repeat(mean, span // self.spec.group_size) + self.x * self.x)
        return out


def _half(value: Array) -> Array:
    """Rounded to float16, within its range."""
    return np.clip(value, F(-65504), F(65504)).astype(np.float16).astype(F)


def _by_block(value: Array, spec: BlockSpec) -> Array:
    """[groups] to [groups per block, blocks]."""
    return np.ascontiguousarray(value.reshape(-1, spec.groups_per_block).T)


def _flat(value: Array) -> Array:
    """Inverse of `_by_block`."""
    return np.ascontiguousarray(value.T).reshape(-1)


def _single(weight: Array, x: Array, weigh: _Weights, spec: BlockSpec) -> CompatFit:
    """Types of one group per block. Codes belong to the scale before it is rounded."""
    top = F(spec.levels - 1)
    if spec.name == "Q8_0":
        unit = np.abs(x).max(axis=0) / F(127)
        units = x * inverse(unit)
        return CompatFit(np.trunc(units + np.copysign(F(0.5), units)) + 128, _half(unit))
    if weigh.importance is None and spec.minima:
        low = x.min(axis=0)
        unit = (x.max(axis=0) - low) / top
        return CompatFit(np.minimum(np.trunc((x - low) * inverse(unit) + F(0.5)), top), _half(unit), dmin=-_half(low))
    if weigh.importance is None:
        unit = extreme(x) / F(-spec.middle)
        return CompatFit(np.minimum(np.trunc(x * inverse(unit) + F(spec.middle + 0.5)), top), _half(unit))
    weights = weigh.with_energy(1)
    if spec.minima:
        codes, unit, least = asymmetric(x, weights, spec.levels - 1, *_WEIGHTED_RANGE)
        return CompatFit(codes, _half(unit), dmin=_half(least))
    codes, unit = symmetric(x, weights, spec.middle)
    return CompatFit(codes, _half(unit))


def _with_minima(x: Array, weigh: _Weights, spec: BlockSpec) -> CompatFit:
    """Q2_K, Q4_K, Q5_K: scales and minima are rounded each on their own, then codes are chosen again."""
    assert spec.multiples is not None
    top, most = spec.levels - 1, spec.multiples[1]
    if weigh.importance is None:
        magnitude = np.abs(x)
        weights = magnitude if top == 3 else np.sqrt(total(x * x) / F(spec.group_size)) + magnitude
        codes, unit, least = asymmetric(x, weights, top, *_MIN_RANGES[spec.name], absolute=top == 3)
        (d, multiples), (dmin, minima) = (_by_largest(_by_block(value, spec), most) for value in (unit, least))
    else:
        weights = weigh.with_energy(1 if top == 3 else 2)
        codes, unit, least = asymmetric(x, weights, top, *_WEIGHTED_RANGE)
        summed = _by_block(total(weights), spec)
        (d, multiples), (dmin, minima) = (positive(_by_block(value, spec), most, summed) for value in (unit, least))
    d, dmin = _half(d), _half(dmin)
    scale, offset = _flat(d * multiples), _flat(dmin * minima)
    chosen = np.clip(nearest((x + offset) / scale), 0, top)
    return CompatFit(np.where(scale != 0, chosen, codes), d, _flat(multiples), dmin, _flat(minima))


def _by_largest(value: Array, most: int) -> tuple[Array, Array]:
    """The unit that makes the largest of value [groups per block, blocks] `most`, and what multiples the others are."""
    largest = value.max(axis=0)
    largest = np.where(largest > 0, largest, F(0))  # no negative zero
    multiples = np.clip(nearest(np.where(largest > 0, F(most) / largest, F(0)) * value), 0, most)
    return largest / F(most), multiples


def _with_signs(x: Array, weigh: _Weights, spec: BlockSpec) -> CompatFit:
    """Q3_K, Q6_K: scales of either sign, then codes are chosen again."""
    assert spec.multiples is not None
    middle, summed = spec.middle, None
    if spec.name == "Q6_K":
        codes, unit = symmetric(x, x * x if weigh.importance is None else weigh.importance, middle)
    elif weigh.importance is None:
        codes, unit = coordinate(x, x * x, middle)
    else:
        weights = weigh.with_energy(2)
        codes, unit = symmetric(x, weights, middle)
        summed = _by_block(total(weights), spec)
    units = _by_block(unit, spec)
    if summed is not None:
        multiples, d = symmetric(units, summed, 32)
        multiples = multiples - F(32)
    else:
        d, multiples = _by_extreme(units, *spec.multiples)
    d = _half(d)
    scale = _flat(d * multiples)
    chosen = np.clip(nearest(x / scale), -middle, middle - 1) + F(middle)
    return CompatFit(np.where(scale != 0, chosen, codes), d, _flat(multiples))


def _by_extreme(value: Array, least: int, most: int) -> tuple[Array, Array]:
    """The unit that makes the largest magnitude of value [groups per block, blocks] `least`, and multiples."""
    largest = extreme(value)
    per_unit = F(least) / largest
    none = np.abs(largest) < F(1e-15) if least == -128 else largest == 0
    empty = F(least if least == -32 else 0)
    multiples = np.clip(nearest(per_unit * value), least, most)
    return np.where(none, F(0), F(1) / per_unit), np.where(none, empty, multiples)


def _curved(x: Array, weigh: _Weights, spec: BlockSpec) -> CompatFit:
    """IQ4_NL, IQ4_XS: codes belong to scales whose unit is not yet rounded to float16."""
    weights = x * x if weigh.importance is None else weigh.with_energy(2)
    unit = curved(x, weights)
    if spec.multiples is None:
        return CompatFit(curved_codes(x * inverse(unit)), _half(unit))
    units = _by_block(unit, spec)
    d = -extreme(units) / F(32)
    multiples = np.clip(nearest(inverse(d) * units), *spec.multiples)
    scale = _flat(d * multiples)
    return CompatFit(curved_codes(x * inverse(scale)), _half(d), _flat(multiples))
