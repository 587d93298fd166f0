"""Affine integer grids of 2 to 8 bits: fitting scales and zero points, coding and decoding.

Symmetric grids are full range: codes -2^(b-1) ... 2^(b-1)-1 around the middle, and the scale carries the sign that
puts the entry of largest magnitude on the longer side. Every decoder multiplies by the scale: a negative one is free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from llmcompress.grids.base import PRODUCT_ROWS, GridSpec, ProgressiveSpec
from llmcompress.grids.errors import UNKNOWN, ByChannel, ByOutput, Errors
from llmcompress.hardware import at_once

Clip = Literal["minmax", "search", "output"]

SMALLEST_SCALE = 2.0**-24  # smallest positive float16
SEARCHED = 1 << 17  # weights searched at once: the temporaries stay in the cache
_SHRINKS = {2: 24, 3: 24, 4: 20, 5: 14, 6: 10, 8: 6}
_NARROWEST = {2: 0.30, 3: 0.45, 4: 0.60, 5: 0.70, 6: 0.80, 8: 0.90}


@dataclass(frozen=True)
class IntegerGrid:
    """Fitted grid of a matrix [out, in].

    scale [out, groups] float32 holding values exact in the stored type; zero [out, groups] float32 whole numbers;
    group_index [in] int64: the group of each input channel (k // group_size unless groups follow the activation order).
    """

    spec: GridSpec
    scale: Tensor
    zero: Tensor
    group_index: Tensor

    offset: ClassVar[None] = None  # what is added to scale * level; the zero point is part of the level here
    table: ClassVar[None] = None  # of levels, where they are neither whole numbers one apart nor floats
    rounded_ = staticmethod(torch.round_)  # values to levels, in place; their bounds are another matter

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Least and largest level of each group [out, groups]."""
        return -self.zero, self.spec.levels - 1 - self.zero

    def levels(self, codes: Tensor) -> Tensor:
        """Levels float32 of codes [out, in]: what they stand for, in units of the scale."""
        return codes.to(torch.float32) - self.zero[:, self.group_index]

    def codes(self, levels: Tensor) -> Tensor:
        """Codes uint8 of levels [out, in]."""
        return (levels + self.zero[:, self.group_index]).to(torch.uint8)

    def encode(self, weight: Tensor) -> Tensor:
        """Nearest codes uint8 of a whole matrix [out, in]."""
        scale, zero = self.scale[:, self.group_index], self.zero[:, self.group_index]
        return (weight / scale + zero).round_().clamp_(0, self.spec.levels - 1).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Values float32 of codes [out, in]: the formula every engine uses."""
        return self.levels(codes) * self.scale[:, self.group_index]

    def stored(self) -> dict[str, Tensor]:
        """Tensors that tell this grid from others of its spec, in small types; `restored` takes them back."""
        return {"scale": self.scale, "zero": self.zero.to(torch.uint8), "group_index": self.group_index.to(torch.int32)}

    @classmethod
    def restored(cls, spec: GridSpec, *, scale: Tensor, zero: Tensor, group_index: Tensor) -> "IntegerGrid":
        return cls(spec, scale, zero.to(torch.float32), group_index.to(torch.int64))

    def to(self, device: torch.device | str) -> "IntegerGrid":
        """The same grid on another device."""
        return IntegerGrid(self.spec, self.scale.to(device), self.zero.to(device), self.group_index.to(device))

    def rescaled(self, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> "IntegerGrid":
        """The grid with other scales [out, groups], rounded to `storable` ones, where `rows` [out] is true."""
        return replace(self, scale=torch.where(rows[:, None], storable(scale, dtype), self.scale))

    def rows(self, index: slice | Tensor) -> "IntegerGrid":
        """The grid of some output rows."""
        return replace(self, scale=self.scale[index], zero=self.zero[index])

    @classmethod
    def stacked(cls, grids: "Sequence[IntegerGrid]") -> "IntegerGrid":
        """The grid of matrices whose rows follow one another."""
        scale, zero = torch.cat([grid.scale for grid in grids]), torch.cat([grid.zero for grid in grids])
        return replace(grids[0], scale=scale, zero=zero)


def fit_whole(weight: Tensor, spec: GridSpec, *, clip: Clip, scale_dtype: torch.dtype = torch.float16) -> IntegerGrid:
    """One scale for all of weight [out, in], kept for every row of a grid with one scale per row."""
    grid = fit(weight.reshape(1, -1), spec, clip=clip, scale_dtype=scale_dtype)
    scale, zero = (part.expand(weight.shape[0], 1).contiguous() for part in (grid.scale, grid.zero))
    return replace(grid, scale=scale, zero=zero, group_index=natural_groups(spec, weight.shape[1]).to(weight.device))


def covering(weight: Tensor, spec: GridSpec) -> Tensor:
    """Values float32 [out, in] of rounding weight to nearest on ranges that cover every weight, groups as stored."""
    block = weight.reshape(weight.shape[0], -1, spec.width(weight.shape[1]))
    grid = fit(weight, spec, clip="minmax")
    scale, zero = grid.scale.unsqueeze(-1), grid.zero.unsqueeze(-1)
    levels: Tensor = (block / scale).add_(zero).round_().clamp_(0, spec.levels - 1).sub_(zero)
    return levels.mul_(scale).reshape(weight.shape)


def storable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales to values that `dtype` and float16 both hold exactly; float32 in, float32 out, sign kept.

    bfloat16 first, float16 second: the same codes can then be written with either type of scale.
    """
    if dtype == torch.bfloat16:
        scale = scale.to(torch.bfloat16).to(torch.float32)
    scale = scale.clamp(-65504.0, 65504.0).to(torch.float16).to(torch.float32)
    tiny = scale.abs() < SMALLEST_SCALE
    return torch.where(tiny, torch.full_like(scale, SMALLEST_SCALE), scale)


def natural_groups(spec: GridSpec | ProgressiveSpec, in_features: int) -> Tensor:
    """group_index [in] of contiguous groups."""
    return torch.arange(in_features) // spec.width(in_features)


def fit(
    weight: Tensor,
    spec: GridSpec,
    *,
    clip: Clip = "search",
    importance: Tensor | None = None,
    gram: Tensor | None = None,
    scale_dtype: torch.dtype = torch.float16,
    order: Tensor | None = None,
) -> IntegerGrid:
    """Choose scales and zero points for weight [out, in] float32.

    minmax: the range covers every weight. search: the range that loses least squared error, each input channel
    weighted by importance [in] (the diagonal of its Gram matrix), then the least-squares scale for the codes it gives;
    the min-max range is a candidate, so a search never does worse on what it minimises. output: the same search, for
    the least error of the group's part of the output (as AWQ clips, arXiv:2306.00978), exact over all
    tokens by the diagonal blocks of gram [in, in], the Gram matrix of the inputs; importance is not looked at.
    order [in]: groups are formed of channels in this order instead of the stored one. Raises TypeError for output
    without gram.
    """
    if order is not None:
        permuted = None if importance is None else importance[order]
        moved = None if gram is None else gram[order][:, order]
        grid = fit(weight[:, order], spec, clip=clip, importance=permuted, gram=moved, scale_dtype=scale_dtype)
        index = torch.empty_like(grid.group_index)
        index[order] = grid.group_index
        return replace(grid, group_index=index)
    rows, width = weight.shape
    group = spec.width(width)
    per_chunk = max(1, at_once(weight, SEARCHED) // width)
    errors: Errors
    if clip == "output":
        if gram is None:
            raise TypeError("the error of outputs is measured by the Gram matrix of the inputs")
        errors, per_chunk = ByOutput.of(gram, group), max(PRODUCT_ROWS, per_chunk)
    else:
        weigh = torch.ones(width, device=weight.device) if importance is None else importance.to(torch.float32)
        errors = ByChannel(positive(weigh).view(1, -1, group))
    scales, zeros = [], []
    for start in range(0, rows, per_chunk):
        block = weight[start : start + per_chunk].reshape(-1, width // group, group)
        chosen = (_fit_symmetric if spec.symmetric else _fit_asymmetric)(block, errors, spec, clip, scale_dtype)
        scales.append(chosen[0])
        zeros.append(chosen[1])
    index = natural_groups(spec, width).to(weight.device)
    return IntegerGrid(spec, torch.cat(scales), torch.cat(zeros), index)


def positive(weigh: Tensor) -> Tensor:
    """Channels that were never active still count a little, so that their weights keep a sensible scale."""
    mean = weigh.mean()
    return torch.ones_like(weigh) if mean <= 0 else weigh + UNKNOWN * mean


def _loss(block: Tensor, errors: Errors, scale: Tensor, zero: Tensor, spec: GridSpec) -> tuple[Tensor, Tensor]:
    """Squared error [rows, groups] of rounding block [rows, groups, group], and the centred codes."""
    scale, zero = scale.unsqueeze(-1), zero.unsqueeze(-1)
    centred = (block / scale).add_(zero).round_().clamp_(0, spec.levels - 1).sub_(zero)
    return errors.squared((centred * scale).sub_(block)), centred


def _refit(block: Tensor, errors: Errors, centred: Tensor, scale: Tensor) -> Tensor:
    """Least-squares scale for fixed centred codes; the old one where all codes are zero."""
    linear, square = errors.products(centred, block)
    return torch.where(square > 0, linear / square.clamp_min(1e-30), scale)


def _shrinks(spec: GridSpec) -> list[float]:
    count, low = _SHRINKS[spec.bits], _NARROWEST[spec.bits]
    return [1 - (1 - low) * i / count for i in range(1, count + 1)]


class _Best:
    """Keeps per group the candidate of least loss; ties keep the earlier (wider) one."""

    def __init__(self, block: Tensor, errors: Errors, spec: GridSpec, dtype: torch.dtype, scale: Tensor, zero: Tensor):
        self.block, self.errors, self.spec, self.dtype = block, errors, spec, dtype
        self.scale, self.zero = storable(scale, dtype), zero
        self.loss, self.centred = _loss(block, errors, self.scale, zero, spec)

    def offer(self, scale: Tensor, zero: Tensor) -> None:
        scale = storable(scale, self.dtype)
        loss, centred = _loss(self.block, self.errors, scale, zero, self.spec)
        better = loss < self.loss
        self.loss = torch.where(better, loss, self.loss)
        self.scale = torch.where(better, scale, self.scale)
        self.zero = torch.where(better, zero, self.zero)
        self.centred = torch.where(better.unsqueeze(-1), centred, self.centred)

    def refit(self, times: int) -> None:
        for _ in range(times):
            self.offer(_refit(self.block, self.errors, self.centred, self.scale), self.zero)


def _fit_symmetric(
    block: Tensor, errors: Errors, spec: GridSpec, clip: Clip, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    low, high = block.amin(-1), block.amax(-1)
    largest = torch.maximum(-low, high)
    sign = torch.where(high > -low, -1.0, 1.0)  # the extreme entry lands on code -2^(b-1)
    middle = torch.full_like(largest, float(spec.middle))
    if clip == "minmax":
        return storable(largest * (2 / (spec.levels - 1)), dtype), middle
    best = _Best(block, errors, spec, dtype, largest * (2 / (spec.levels - 1)), middle)
    full = sign * largest / spec.middle
    for shrink in (spec.middle / max(spec.middle - 1, 1), 1.0, *_shrinks(spec)):
        best.offer(full * shrink, middle)
    best.refit(2)
    return best.scale, best.zero


def _fit_asymmetric(
    block: Tensor, errors: Errors, spec: GridSpec, clip: Clip, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    low, high = block.amin(-1).clamp_max(0), block.amax(-1).clamp_min(0)  # the range contains zero
    top = spec.levels - 1

    def candidate(below: float, above: float) -> tuple[Tensor, Tensor]:
        scale = storable((high * above - low * below) / top, dtype)
        return scale, (-low * below / scale).round().clamp(0, top)

    scale, zero = candidate(1.0, 1.0)
    if clip == "minmax":
        return scale, zero
    best = _Best(block, errors, spec, dtype, scale, zero)
    for shrink in _shrinks(spec):
        best.offer(*candidate(shrink, shrink))
    for step in (-1.0, 1.0):
        best.offer(best.scale, (best.zero + step).clamp(0, top))
    best.refit(2)
    return best.scale, best.zero
