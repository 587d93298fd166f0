"""Floats of 8 bits with one scale for a whole matrix: E4M3 codes as ModelOpt's FP8 and many published files have them.

Matrices that engines fuse share the scale: of several they would keep the largest, and round the other codes anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from llmcompress.grids.base import PER_ROW, Clip, GridRequest, Spec
from llmcompress.grids.coded import Coded
from llmcompress.grids.e4m3 import LARGEST
from llmcompress.grids.float8 import CHUNK, FACTORS, FloatGrid, exact, rounding_loss
from llmcompress.grids.grid_type import Fitting, GridType
from llmcompress.grids.scales import natural_groups
from llmcompress.hardware import at_once
from llmcompress.lazy import Tensor, torch


@dataclass(frozen=True)
class Float8TensorSpec(Spec):
    """w = scale * code, one scale for all weights of a matrix."""

    type: ClassVar[str] = "fp8-tensor"
    name: ClassVar[str] = "fp8-tensor"
    bits: ClassVar[int] = 8
    group_size: ClassVar[int] = PER_ROW
    symmetric: ClassVar[bool] = True
    scaled: ClassVar[bool] = True
    joins_rows: ClassVar[bool] = True
    joins_matrices: ClassVar[bool] = True

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight of a square matrix, a scale of 32 bits."""
        return self.bits + 32 / in_features**2


@dataclass(frozen=True)
class TensorFloatGrid(FloatGrid):
    """The grid of a matrix [out, in]: scale [out, 1] float32, the same for all rows; chosen once, as that of tiles."""

    spec: Float8TensorSpec  # type: ignore[assignment]

    def refit(self, codes: Tensor, hessian: Tensor, gradient: Tensor, scale_dtype: torch.dtype) -> Coded:
        return Coded(codes, self)


class TensorFloats8(GridType):
    """Floats of 8 bits times a scale of their matrix."""

    name = "fp8-tensor"
    place = 11
    values = "8-bit floats times a scale per matrix"
    pattern = "fp8-tensor"
    widths = (8,)
    formats = ("compressed-tensors", "modelopt")

    def named(self, found: re.Match[str]) -> Spec:
        return Float8TensorSpec()

    def spec(self, asked: GridRequest) -> Spec:
        return Float8TensorSpec()

    def listed(self) -> list[tuple[str, str]]:
        return [("fp8-tensor", "253 floats (E4M3); 8 bits per weight, and a scale per matrix")]

    def fit(self, weight: Tensor, spec: Float8TensorSpec, how: Fitting) -> TensorFloatGrid:
        scale = best_scale(weight, how.clip, how.importance, how.scale_dtype or torch.float16)
        index = natural_groups(spec, weight.shape[1]).to(weight.device)
        return TensorFloatGrid(spec, scale.expand(len(weight), 1).contiguous(), index)

    def restored(self, spec: Float8TensorSpec, width: int, parts: Mapping[str, Tensor]) -> TensorFloatGrid:
        return TensorFloatGrid(spec, parts["scale"].to(torch.float32), natural_groups(spec, width))


GRID = TensorFloats8()


def best_scale(weight: Tensor, clip: Clip, importance: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The scale [1, 1] float32 of weight [out, in] float32, as `float8.fit` chooses those of rows.

    importance [in]: what an error in an input channel costs. dtype: in which the scale is stored.
    """
    weigh = torch.ones(weight.shape[1], device=weight.device) if importance is None else importance.to(torch.float32)
    parts = torch.split(weight, max(1, at_once(weight, CHUNK) // weight.shape[1]))
    whole = (weight.abs().amax() / LARGEST).reshape(1, 1)
    if clip == "minmax":
        return exact(whole, dtype)

    def lost(scale: Tensor) -> float:
        return sum(float(rounding_loss(part, weigh, scale)[0].sum(dtype=torch.float64)) for part in parts)

    best = min((exact(whole * factor, dtype) for factor in (1.0, *FACTORS)), key=lost)
    above = below = torch.zeros(1, 1, device=weight.device)
    for part in parts:
        levels = rounding_loss(part, weigh, best)[1]
        above = above + (levels * part * weigh).sum()
        below = below + (levels**2 * weigh).sum()
    return min(best, exact(above / below.clamp_min(1e-30), dtype), key=lost)
