"""NVFP4 without a factor of the matrix: floats of 4 bits in groups of 16 whose float of 8 bits is the scale itself.

That is the mode `nvfp4` of MLX. Scales below 2^-6 are multiples of 2^-9, so that matrices of small weights lose more
than by NVFP4 with its factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from llmcompress.grids.grid_type import Fitting
from llmcompress.grids.nvfp4 import Nvfp4, Nvfp4Grid, Nvfp4Spec, fit
from llmcompress.lazy import Tensor, torch


@dataclass(frozen=True)
class PlainNvfp4Spec(Nvfp4Spec):
    """E2M1 codes times an E4M3 scale for each 16 input channels of a row."""

    type: ClassVar[str] = "nvfp4-plain"
    name: ClassVar[str] = "nvfp4-plain"
    joins_rows: ClassVar[bool] = False
    joins_matrices: ClassVar[bool] = False
    gguf_type: ClassVar[str | None] = None  # type: ignore[assignment]

    def parts(self, rows: int, width: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        parts = super().parts(rows, width)
        return {name: parts[name] for name in ("weight_packed", "weight_scale")}


class PlainNvfp4(Nvfp4):
    """Floats of 4 bits times a float of 8 bits of their group, and nothing else."""

    name = "nvfp4-plain"
    place = 8
    values = "4-bit floats in blocks of 16, without a factor of the matrix"
    pattern = "nvfp4-plain"
    formats: ClassVar[tuple[str, ...]] = ("mlx",)
    made = PlainNvfp4Spec()

    def fit(self, weight: Tensor, spec: Nvfp4Spec, how: Fitting) -> Nvfp4Grid:
        return fit(weight, how.clip, how.importance, spec, torch.ones(1, device=weight.device))

    def restored(self, spec: Nvfp4Spec, width: int, parts: Mapping[str, Tensor]) -> Nvfp4Grid:
        return Nvfp4Grid(spec, parts["small"].to(torch.float32), torch.ones(1, device=parts["small"].device))


GRID = PlainNvfp4()
