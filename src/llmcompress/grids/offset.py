"""Integers of 2 to 8 bits times a scale plus an offset, both free for each group: the affine mode of MLX.

An offset need not be a multiple of its scale, as a zero point is, so that a range begins anywhere. A search over ranges
finds scales and offsets for given errors of channels; least squares fit both to the codes that were chosen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from llmcompress.errors import RecipeError
from llmcompress.grids.base import PRODUCT_ROWS, GridRequest, InputSpec, Spec
from llmcompress.grids.coded import Coded, Grid, wide
from llmcompress.grids.errors import Errors
from llmcompress.grids.grid_type import Fitting, GridType
from llmcompress.grids.integer import INTEGER_BITS, resolved
from llmcompress.grids.scales import float16, natural_groups, storable
from llmcompress.hardware import at_once
from llmcompress.lazy import Tensor, torch

SIZES = (64, 32, 128)  # the groups that MLX has, its default first
_SEARCHED = 1 << 17  # weights searched at once: the temporaries stay in the cache
_NARROWEST = {2: 0.45, 3: 0.55, 4: 0.65, 5: 0.75, 6: 0.85, 8: 0.92}  # of the ranges tried
_TRIED = 12  # ranges
_ENDS = (0.97, 0.93, 0.88)  # of the best range, with the other end where it is
_ROUNDS = 2  # of descent


@dataclass(frozen=True)
class OffsetSpec(Spec):
    """w = scale * code + offset, codes 0 ... 2^bits - 1, one scale and one offset for `group_size` input channels."""

    bits: int
    group_size: int

    type: ClassVar[str] = "offset"
    symmetric: ClassVar[bool] = False
    scaled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in INTEGER_BITS or self.group_size not in SIZES:
            raise RecipeError(
                f"integers with an offset have {', '.join(map(str, INTEGER_BITS))} bits in groups of "
                f"{', '.join(map(str, sorted(SIZES)))}, not {self.bits} bits in groups of {self.group_size}",
                "choose one of them",
            )

    @property
    def name(self) -> str:
        return f"int{self.bits}-g{self.group_size}-offset"

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight, scales and offsets of 16 bits included."""
        return self.bits + 32 / self.group_size


@dataclass(frozen=True)
class OffsetGrid(Grid):
    """Fitted grid of a matrix [out, in]: scale, start [out, groups] float32, exact in the type they are stored in.

    start: the value of code 0.
    """

    spec: OffsetSpec
    scale: Tensor
    start: Tensor

    by_row: ClassVar[Mapping[str, str | None]] = {"scale": None, "start": None}

    @property
    def offset(self) -> Tensor:
        return self.start

    @property
    def group_index(self) -> Tensor:
        return natural_groups(self.spec, self.scale.shape[1] * self.spec.group_size).to(self.scale.device)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(self.scale), torch.full_like(self.scale, self.spec.levels - 1)

    def levels(self, codes: Tensor) -> Tensor:
        return codes.to(torch.float32)

    def codes(self, levels: Tensor) -> Tensor:
        return levels.to(torch.uint8)

    def encode(self, weight: Tensor) -> Tensor:
        scale, start = self._spread()
        return ((weight - start) / scale).round_().clamp_(0, self.spec.levels - 1).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        scale, start = self._spread()
        return self.levels(codes).mul_(scale).add_(start)

    def _spread(self) -> tuple[Tensor, Tensor]:
        size = self.spec.group_size
        return self.scale.repeat_interleave(size, dim=1), self.start.repeat_interleave(size, dim=1)

    @property
    def factor_index(self) -> Tensor:
        return self.group_index

    def multiplied(self, factors: Tensor, scale_dtype: torch.dtype) -> OffsetGrid:
        scale, start = storable(self.scale * factors, scale_dtype), stored_offset(self.start * factors, scale_dtype)
        return replace(self, scale=scale, start=start)

    def refit(self, codes: Tensor, hessian: Tensor, gradient: Tensor, scale_dtype: torch.dtype) -> Coded:
        """Scale and offset of one group after another by least squares, the others fixed; no step loses.

        A row's loss is (w - q) H (w - q)^T. A change delta of its values lowers it by 2 gradient . delta
        - delta H delta^T, with gradient = (w - q) H.
        """
        scale, start, size = self.scale.clone(), self.start.clone(), self.spec.group_size
        levels, gradient = self.levels(codes), gradient.clone()
        for _ in range(_ROUNDS):
            for group in range(scale.shape[1]):
                columns = slice(group * size, (group + 1) * size)
                here, block = levels[:, columns], hessian[columns, columns]
                bent, flat = here @ block, block.sum(dim=0)
                square = torch.stack(
                    [(bent * here).sum(dim=1), bent.sum(dim=1), flat.sum().expand(len(here))]
                )  # of scale with scale, scale with offset, offset with offset
                slope = torch.stack([(gradient[:, columns] * here).sum(dim=1), gradient[:, columns].sum(dim=1)])
                step = _solved(square, slope)
                change = (
                    storable(scale[:, group] + step[0], scale_dtype) - scale[:, group],
                    stored_offset(start[:, group] + step[1], scale_dtype) - start[:, group],
                )
                gain = 2 * (slope[0] * change[0] + slope[1] * change[1]) - (
                    square[0] * change[0] ** 2 + 2 * square[1] * change[0] * change[1] + square[2] * change[1] ** 2
                )
                moved = [torch.where(gain > 0, part, 0.0) for part in change]
                scale[:, group] += moved[0]
                start[:, group] += moved[1]
                gradient.addmm_(here * moved[0].unsqueeze(1) + moved[1].unsqueeze(1), hessian[columns], alpha=-1)
        return Coded(codes, replace(self, scale=scale, start=start))


class Offsets(GridType):
    """Whole numbers times a scale plus an offset."""

    name = "offset"
    place = 10
    values = "integers times a scale plus an offset, the affine mode of MLX"
    pattern = r"int(\d)-g(\d+)-offset"
    widths = INTEGER_BITS
    grouped = True
    group_sizes = SIZES
    output_clip = True
    formats = ("mlx",)

    def named(self, found: re.Match[str]) -> Spec:
        return OffsetSpec(int(found[1]), int(found[2]))

    def spec(self, asked: GridRequest) -> Spec:
        return OffsetSpec(asked.bits, resolved(asked))

    def listed(self) -> list[tuple[str, str]]:
        said = "{} levels; {:.3f} bits per weight at groups of 64"
        return [(f"int{b}-gN-offset", said.format(1 << b, b + 32 / 64)) for b in INTEGER_BITS]

    def label(self, asked: GridRequest, inputs: InputSpec | None) -> str:
        return f"w{asked.bits}"

    def group_label(self, asked: GridRequest) -> str:
        return "" if asked.group_size is None else f"g{asked.group_size}"

    def fit(self, weight: Tensor, spec: OffsetSpec, how: Fitting) -> OffsetGrid:
        return fit(weight, spec, how)

    def restored(self, spec: OffsetSpec, width: int, parts: Mapping[str, Tensor]) -> OffsetGrid:
        return OffsetGrid(spec, **wide(parts))


GRID = Offsets()


def stored_offset(start: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Offsets rounded to values that `dtype` and float16 both hold; float32 in, float32 out."""
    return float16(start.to(torch.bfloat16).to(torch.float32) if dtype == torch.bfloat16 else start)


def fit(weight: Tensor, spec: OffsetSpec, how: Fitting) -> OffsetGrid:
    """Choose scales and offsets for weight [out, in] float32.

    minmax: the range covers every weight. search: of ranges within it the one of least squared error, each input
    channel weighted by importance [in], then least squares for the codes it gives; output: the same by the error of the
    group's part of the output, by the diagonal blocks of gram [in, in].
    """
    width, size = weight.shape[1], spec.group_size
    errors = Errors.of(weight, size, how.clip, how.importance, how.gram)
    parts = torch.split(weight, max(PRODUCT_ROWS, at_once(weight, _SEARCHED) // width))
    found = [_fit(part.reshape(len(part), -1, size), errors, spec, how) for part in parts]
    return OffsetGrid(spec, *(torch.cat(tensors) for tensors in zip(*found, strict=True)))


def _fit(block: Tensor, errors: Errors, spec: OffsetSpec, how: Fitting) -> tuple[Tensor, Tensor]:
    """Scales and offsets [rows, groups] of a block [rows, groups, group]."""
    top, dtype = spec.levels - 1, how.scale_dtype

    def placed(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return storable((high - low) / top, dtype), stored_offset(low, dtype)

    low, high = block.amin(-1), block.amax(-1)
    scale, start = placed(low, high)
    if how.clip == "minmax":
        return scale, start

    def codes_of(scale: Tensor, start: Tensor) -> Tensor:
        scale, start = scale.unsqueeze(-1), start.unsqueeze(-1)
        return ((block - start) / scale).round_().clamp_(0, top)

    def loss_of(scale: Tensor, start: Tensor) -> Tensor:
        values = codes_of(scale, start).mul_(scale.unsqueeze(-1)).add_(start.unsqueeze(-1))
        return errors.squared(values.sub_(block))

    best, least = (scale, start), loss_of(scale, start)

    def offer(scale: Tensor, start: Tensor) -> None:
        nonlocal best, least
        loss = loss_of(scale, start)
        better = loss < least
        best = torch.where(better, scale, best[0]), torch.where(better, start, best[1])
        least = torch.where(better, loss, least)

    for share in _shares(_NARROWEST[spec.bits]):
        cut = (high - low) * ((1 - share) / 2)
        offer(*placed(low + cut, high - cut))
    below, above = best[1], best[1] + top * best[0]
    for share in _ENDS:
        cut = (above - below) * (1 - share)
        offer(*placed(below + cut, above))
        offer(*placed(below, above - cut))
    one = torch.ones_like(block)
    for _ in range(_ROUNDS):
        codes = codes_of(*best)
        along, square = errors.products(codes, block)
        cross, flat = errors.products(one, codes)[0], errors.products(one, one)[1]
        fitted = _solved(torch.stack([square, cross, flat]), torch.stack([along, errors.products(one, block)[0]]))
        offer(storable(fitted[0], dtype), stored_offset(fitted[1], dtype))
    return best


def _shares(narrowest: float) -> Iterator[float]:
    """Of the whole range, widths to try."""
    return (1 - (1 - narrowest) * step / _TRIED for step in range(1, _TRIED + 1))


def _solved(square: Tensor, slope: Tensor) -> Tensor:
    """The solutions [2, ...] of symmetric pairs of equations; zero where codes are all alike.

    square [3, ...]: first with first, first with second, second with second. slope [2, ...].
    """
    determinant = square[0] * square[2] - square[1] * square[1]
    apart = determinant > 1e-4 * square[0] * square[2]
    safe = torch.where(apart, determinant, 1.0)
    scale = torch.where(apart, (slope[0] * square[2] - slope[1] * square[1]) / safe, 0.0)
    start = torch.where(apart, (slope[1] * square[0] - slope[0] * square[1]) / safe, 0.0)
    return torch.stack([scale, start])
