"""Affine integer grids of 2 to 8 bits: fitting scales and zero points, coding and decoding.

Symmetric grids are full range: codes -2^(b-1) ... 2^(b-1)-1 around the middle, and the scale carries the sign that
puts the entry of largest magnitude on the longer side. Every decoder multiplies by the scale: a negative one is free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from llmcompress.errors import RecipeError
from llmcompress.grids.base import PER_ROW, PRODUCT_ROWS, Clip, GridRequest, InputSpec, Spec
from llmcompress.grids.coded import wide
from llmcompress.grids.errors import Errors
from llmcompress.grids.grid_type import Fitting, GridType
from llmcompress.grids.scales import ScaledGrid, natural, natural_groups, storable
from llmcompress.hardware import at_once
from llmcompress.lazy import Tensor, torch

if TYPE_CHECKING:
    from llmcompress.workers import Workers

INTEGER_BITS = (2, 3, 4, 5, 6, 8)
SEARCHED = 1 << 18  # weights searched at once: the temporaries stay in the cache, and calls are few
_SHRINKS = {2: 24, 3: 24, 4: 20, 5: 14, 6: 10, 8: 6}
_NARROWEST = {2: 0.30, 3: 0.45, 4: 0.60, 5: 0.70, 6: 0.80, 8: 0.90}


@dataclass(frozen=True)
class IntegerSpec(Spec):
    """w = scale * (code - zero_point), codes 0 ... 2^bits - 1.

    group_size: input channels that share a scale; -1 for one scale per output row. symmetric: every zero point is
    2^(bits-1). Raises RecipeError for widths or groups that do not exist.
    """

    bits: int
    group_size: int
    symmetric: bool = True

    type: ClassVar[str] = "int"
    affine: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in INTEGER_BITS:
            raise RecipeError(
                f"integer grids have {', '.join(map(str, INTEGER_BITS))} bits, not {self.bits}", "choose one of them"
            )
        if self.group_size != PER_ROW and self.group_size < 1:
            raise RecipeError(
                f"group size {self.group_size} is not a size", "use a positive number, or -1 for one per row"
            )

    @property
    def name(self) -> str:
        group = "row" if self.group_size == PER_ROW else f"g{self.group_size}"
        return f"int{self.bits}-{group}-{'sym' if self.symmetric else 'asym'}"

    def bits_per_weight(self, in_features: int, scale_bits: int = 16) -> float:
        """Stored bits per weight, scales and zero points included."""
        side = scale_bits + (0 if self.symmetric else self.bits)
        return self.bits + side / self.width(in_features)

    @property
    def zero_points(self) -> tuple[int, int]:
        return (self.middle, self.middle) if self.symmetric else (0, self.levels - 1)


@dataclass(frozen=True)
class IntegerGrid(ScaledGrid):
    """Fitted grid of a matrix [out, in].

    scale [out, groups] float32 holding values exact in the stored type; zero [out, groups] float32 whole numbers;
    group_index [in] int64: the group of each input channel (k // group_size unless groups follow the activation order).
    """

    spec: IntegerSpec
    scale: Tensor
    zero: Tensor
    group_index: Tensor

    by_row: ClassVar[Mapping[str, str | None]] = {"scale": None, "zero": "uint8"}
    shared: ClassVar[Mapping[str, str | None]] = {"group_index": "int32"}

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        return -self.zero, self.spec.levels - 1 - self.zero

    def levels(self, codes: Tensor) -> Tensor:
        levels = codes.to(torch.float32, copy=True)
        return levels.sub_(self.spec.middle) if self.centred else self._each(torch.Tensor.sub_, levels, self.zero)

    def codes(self, levels: Tensor) -> Tensor:
        if self.centred:
            return (levels + self.spec.middle).to(torch.uint8)
        return self._each(torch.Tensor.add_, levels.clone(), self.zero).to(torch.uint8)

    def encode(self, weight: Tensor) -> Tensor:
        levels = self._each(torch.Tensor.add_, self._each(torch.Tensor.div_, weight.clone(), self.scale), self.zero)
        return levels.round_().clamp_(0, self.spec.levels - 1).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        return self._each(torch.Tensor.mul_, self.levels(codes), self.scale)

    def _each(self, operation: Callable[[Tensor, Tensor], Tensor], values: Tensor, part: Tensor) -> Tensor:
        """Values [out, in] after an operation in place with the number that their group has in part [out, groups]."""
        if self._in_order and values.is_contiguous():
            operation(values.view(*part.shape, -1), part.unsqueeze(-1))
        else:
            operation(values, part[:, self.group_index])
        return values

    @cached_property
    def centred(self) -> bool:
        """Whether every zero point is the middle code, as it is of symmetric grids but for files of others."""
        return bool((self.zero == self.spec.middle).all())

    @cached_property
    def _in_order(self) -> bool:
        """Whether groups are as many neighbouring channels each, in order."""
        index, groups = self.group_index, self.scale.shape[1]
        size = max(1, -(-len(index) // groups))
        return size * groups == len(index) and torch.equal(index, natural(len(index), size).to(index.device))

    def rescaled(self, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> IntegerGrid:
        return replace(self, scale=torch.where(rows[:, None], storable(scale, dtype), self.scale))


class Integers(GridType):
    """Whole numbers times a scale, with or without zero points."""

    name = "int"
    place = 0
    values = "integers times a scale"
    pattern = r"int(\d)-(?:row|g(\d+))-(a?)sym"
    grouped = True
    group_sizes = (256, 192, 128, 96, 64, 48, 32, 16)
    per_row = True
    output_clip = True
    formats = ("compressed-tensors", "gptq")

    def named(self, found: re.Match[str]) -> Spec:
        return IntegerSpec(int(found[1]), int(found[2] or PER_ROW), not found[3])

    def spec(self, asked: GridRequest) -> Spec:
        return IntegerSpec(asked.bits, resolved(asked), asked.sym)

    def listed(self) -> list[tuple[str, str]]:
        said = "{} levels; {:.3f} bits per weight at groups of 128, symmetric"
        return [(f"int{b}-{{row,gN}}-{{sym,asym}}", said.format(1 << b, b + 16 / 128)) for b in INTEGER_BITS]

    def label(self, asked: GridRequest, inputs: InputSpec | None) -> str:
        weights = f"w{asked.bits}"
        if inputs is None:
            return weights
        return f"{weights}a8" if inputs.type == "int" else f"{weights}-{inputs.name}"

    def group_label(self, asked: GridRequest) -> str:
        size = asked.group_size
        return "" if size is None else "row" if size < 0 else f"g{size}"

    def fit(self, weight: Tensor, spec: IntegerSpec, how: Fitting) -> IntegerGrid:
        return fit(
            weight,
            spec,
            clip=how.clip,
            importance=how.importance,
            gram=how.gram,
            scale_dtype=how.scale_dtype,
            order=how.order,
        )

    def nearest(self, weight: Tensor, spec: IntegerSpec, workers: Workers) -> Tensor:
        return covering(weight, spec)

    def restored(self, spec: IntegerSpec, width: int, parts: Mapping[str, Tensor]) -> IntegerGrid:
        return IntegerGrid(spec, **wide(parts))


GRID = Integers()


def resolved(asked: GridRequest) -> int:
    """The group size of a method, which must have been chosen."""
    if asked.group_size is None:
        raise RecipeError("the group size has not been resolved")
    return asked.group_size


def fit_whole(weight: Tensor, spec: IntegerSpec, *, clip: Clip, scale_dtype: torch.dtype | None = None) -> IntegerGrid:
    """One scale for all of weight [out, in], kept for every row of a grid with one scale per row."""
    grid = fit(weight.reshape(1, -1), spec, clip=clip, scale_dtype=scale_dtype)
    scale, zero = (part.expand(weight.shape[0], 1).contiguous() for part in (grid.scale, grid.zero))
    return replace(grid, scale=scale, zero=zero, group_index=natural_groups(spec, weight.shape[1]).to(weight.device))


def covering(weight: Tensor, spec: IntegerSpec) -> Tensor:
    """Values float32 [out, in] of rounding weight to nearest on ranges that cover every weight, groups as stored."""
    block = weight.reshape(weight.shape[0], -1, spec.width(weight.shape[1]))
    grid = fit(weight, spec, clip="minmax")
    scale, zero = grid.scale.unsqueeze(-1), grid.zero.unsqueeze(-1)
    levels: Tensor = (block / scale).add_(zero).round_().clamp_(0, spec.levels - 1).sub_(zero)
    return levels.mul_(scale).reshape(weight.shape)


def fit(
    weight: Tensor,
    spec: IntegerSpec,
    *,
    clip: Clip = "search",
    importance: Tensor | None = None,
    gram: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
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
    from llmcompress.grids.scripted_search import searched

    rows, width = weight.shape
    group = spec.width(width)
    errors = Errors.of(weight, group, clip, importance, gram)
    per_chunk = max(PRODUCT_ROWS if errors.by_output else 1, at_once(weight, SEARCHED) // width)
    asked = errors.weigh, errors.by_output, spec.symmetric, scale_dtype == torch.bfloat16, spec.levels - 1
    shares, step = ([], 0.0) if clip == "minmax" else _shares(spec)
    scales, zeros = [], []
    for start in range(0, rows, per_chunk):
        block = weight[start : start + per_chunk].reshape(-1, width // group, group)
        scale, zero = searched(block, *asked, shares, step)
        scales.append(scale)
        zeros.append(zero)
    index = natural_groups(spec, width).to(weight.device)
    return IntegerGrid(spec, torch.cat(scales), torch.cat(zeros), index)


def _shares(spec: IntegerSpec) -> tuple[list[float], float]:
    """Ranges to try, as shares of the one whose ends are codes, and by how much the best is then changed."""
    count, low, middle = _SHRINKS[spec.bits], _NARROWEST[spec.bits], spec.middle
    widest = [middle / max(middle - 1, 1), 1.0] if spec.symmetric else []
    step = (1 - low) / count
    return [*widest, *(1 - step * i for i in range(2, count + 1, 2))], step
