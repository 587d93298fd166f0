"""Floats of 8 bits as a grid: E4M3 codes times one scale per output row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from llmcompress.errors import RecipeError
from llmcompress.grids.base import PER_ROW, Clip, GridRequest, InputSpec, Spec
from llmcompress.grids.e4m3 import LARGEST, E4m3Grid, rounded_
from llmcompress.grids.grid_type import Fitting, GridType
from llmcompress.grids.integer import resolved
from llmcompress.grids.scales import SMALLEST_SCALE, ScaledGrid, natural_groups, storable
from llmcompress.hardware import at_once
from llmcompress.lazy import Tensor, torch

CHUNK = 1 << 17  # weights searched at once: the temporaries stay in the cache
# a float's relative step is the same within an octave but for where it begins: scales of one octave try all beginnings
FACTORS = tuple(2.0 ** (step / 8) for step in (*range(-3, 0), *range(1, 8)))


@dataclass(frozen=True)
class Float8Spec(Spec):
    """w = scale * code, codes floats of the kind E4M3 (4 bits of exponent, 3 of mantissa, 448 at most).

    One scale per output row. Raises RecipeError for widths, groups or zero points that do not exist.
    """

    bits: int = 8
    group_size: int = PER_ROW
    symmetric: bool = True

    type: ClassVar[str] = "fp8"
    scaled: ClassVar[bool] = True
    name: ClassVar[str] = "fp8-row"

    def __post_init__(self) -> None:
        if self.bits != 8:
            raise RecipeError(f"codes of type fp8 have 8 bits, not {self.bits}", "use --bits 8, or --type int")
        if self.group_size != PER_ROW:
            raise RecipeError(
                f"codes of type fp8 have one scale per row, not per {self.group_size} inputs", "use --group-size -1"
            )
        if not self.symmetric:
            raise RecipeError("codes of type fp8 have no zero points", "use --sym, or --type int")

    def bits_per_weight(self, in_features: int) -> float:
        return self.bits + 16 / in_features


@dataclass(frozen=True)
class FloatGrid(E4m3Grid, ScaledGrid):
    """Fitted float grid of a matrix [out, in]: scale [out, 1] float32, values exact in the stored type."""

    spec: Float8Spec
    scale: Tensor
    group_index: Tensor

    by_row: ClassVar[Mapping[str, str | None]] = {"scale": None}

    def encode(self, weight: Tensor) -> Tensor:
        return self.codes(weight / self.scale)

    def decode(self, codes: Tensor) -> Tensor:
        return self.levels(codes) * self.scale

    def to(self, device: torch.device | str) -> FloatGrid:
        return FloatGrid(self.spec, self.scale.to(device), self.group_index.to(device))

    def rescaled(self, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> FloatGrid:
        return replace(self, scale=torch.where(rows[:, None], storable(scale, dtype), self.scale))


class Floats8(GridType):
    """Floats of 8 bits times a scale of their row."""

    name = "fp8"
    place = 1
    values = "8-bit floats (E4M3) times a scale per row"
    pattern = "fp8-row"
    widths = (8,)
    default_group = PER_ROW
    formats = ("compressed-tensors",)

    def named(self, found: re.Match[str]) -> Spec:
        return Float8Spec()

    def spec(self, asked: GridRequest) -> Spec:
        return Float8Spec(asked.bits, resolved(asked), asked.sym)

    def listed(self) -> list[tuple[str, str]]:
        return [("fp8-row", "253 floats (E4M3); 8 bits per weight, and a scale per row")]

    def label(self, asked: GridRequest, inputs: InputSpec | None) -> str:
        return "fp8" if inputs is None else f"fp8-{inputs.name}"

    def fit(self, weight: Tensor, spec: Float8Spec, how: Fitting) -> FloatGrid:
        return fit(weight, spec, clip=how.clip, importance=how.importance, scale_dtype=how.scale_dtype)

    def restored(self, spec: Float8Spec, width: int, parts: Mapping[str, Tensor]) -> FloatGrid:
        return FloatGrid(spec, parts["scale"], natural_groups(spec, width))


GRID = Floats8()


def fit(
    weight: Tensor,
    spec: Float8Spec,
    *,
    clip: Clip = "search",
    importance: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
) -> FloatGrid:
    """Choose scales for weight [out, in] float32.

    minmax: the largest weight of a row is 448 scales. search: of scales around that, the one that loses least squared
    error, each input channel weighted by importance [in], then the least-squares scale for the codes it gives; the
    min-max one is a candidate and wins ties.
    """
    weigh = torch.ones(weight.shape[1], device=weight.device) if importance is None else importance.to(torch.float32)
    step = max(1, at_once(weight, CHUNK) // weight.shape[1])
    parts = [best_scales(rows, weigh, clip, scale_dtype or torch.float16) for rows in torch.split(weight, step)]
    return FloatGrid(spec, torch.cat(parts), natural_groups(spec, weight.shape[1]).to(weight.device))


def best_scales(rows: Tensor, weigh: Tensor, clip: Clip, dtype: torch.dtype) -> Tensor:
    """Scales [rows, 1], as `fit` says, of weights [rows, in]; weigh [in] or [rows, in]: what an error costs."""
    whole = rows.abs().amax(dim=1, keepdim=True) / LARGEST
    best = exact(whole, dtype)
    if clip == "minmax":
        return best
    least, levels = rounding_loss(rows, weigh, best)
    candidates = [whole * factor for factor in FACTORS]
    for number in range(len(candidates) + 2):
        refit = (levels * rows * weigh).sum(1, keepdim=True) / (levels**2 * weigh).sum(1, keepdim=True).clamp_min(1e-30)
        scale = exact(candidates[number] if number < len(candidates) else refit, dtype)
        loss, found = rounding_loss(rows, weigh, scale)
        better = loss < least
        least, best = torch.where(better, loss, least), torch.where(better, scale, best)
        levels = torch.where(better, found, levels)
    return best


def rounding_loss(rows: Tensor, weigh: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted squared error [rows, 1] of rounding, and the levels."""
    levels = rounded_(rows / scale)
    return ((levels * scale).sub_(rows).square_().mul_(weigh)).sum(1, keepdim=True), levels


def exact(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales rounded to values of the type they are stored in, never zero; float32."""
    return scale.to(dtype).to(torch.float32).clamp_min(SMALLEST_SCALE)
