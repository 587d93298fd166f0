"""Floats of 8 bits in tiles: E4M3 codes times one scale per tile of a matrix, chosen in tiles of 128 x 128.

Tiles begin at the first row and column and are cut off where the matrix ends, so the last of them may not be full.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from llmcompress.errors import RecipeError
from llmcompress.grids.base import GridRequest, Spec
from llmcompress.grids.coded import Coded
from llmcompress.grids.e4m3 import E4m3Grid
from llmcompress.grids.float8 import best_scales
from llmcompress.grids.grid_type import Fitting, GridType
from llmcompress.lazy import Tensor, torch

_BLOCK = (128, 128)


@dataclass(frozen=True)
class TiledFloatSpec(Spec):
    """w = scale * code, one scale for each tile of `rows` outputs and `columns` inputs."""

    rows: int
    columns: int

    type: ClassVar[str] = "fp8-block"
    bits: ClassVar[int] = 8
    symmetric: ClassVar[bool] = True
    scaled: ClassVar[bool] = True
    joins_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise RecipeError(f"there are no tiles of {self.rows} x {self.columns} weights")

    @property
    def name(self) -> str:
        return f"fp8-{self.rows}x{self.columns}"

    @property
    def tile(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def group_size(self) -> int:
        return self.columns

    def groups(self, in_features: int) -> int:
        return -(-in_features // self.columns)

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight, scales of 32 bits."""
        return self.bits + 32 * self.groups(in_features) / (self.rows * in_features)


@dataclass(frozen=True)
class TiledFloatGrid(E4m3Grid):
    """The grid of a matrix [out, in]: scale [out, column tiles] float32, the same for all rows of a tile.

    Levels of a float are as near in whichever octave: scales are chosen once, and stay where codes are chosen anew.
    """

    spec: TiledFloatSpec
    scale: Tensor

    by_row: ClassVar[Mapping[str, str | None]] = {"scale": None}

    @property
    def group_index(self) -> Tensor:
        """The tile of each input channel, and of those beyond the last that would fill it."""
        return torch.arange(self.scale.shape[1], device=self.scale.device).repeat_interleave(self.spec.columns)

    def encode(self, weight: Tensor) -> Tensor:
        return self.codes((weight / self._spread(weight.shape[1])).nan_to_num_())

    def decode(self, codes: Tensor) -> Tensor:
        return self.levels(codes).mul_(self._spread(codes.shape[1]))

    def refit(self, codes: Tensor, hessian: Tensor, gradient: Tensor, scale_dtype: torch.dtype) -> Coded:
        return Coded(codes, self)

    def _spread(self, width: int) -> Tensor:
        return self.scale.repeat_interleave(self.spec.columns, dim=1)[:, :width]


class TiledFloats(GridType):
    """Floats of 8 bits times a scale of their tile; tiles of other sizes than 128 x 128 are read alone."""

    name = "fp8-block"
    place = 9
    values = "8-bit floats in blocks of 128 x 128"
    pattern = r"fp8-(\d+)x(\d+)"
    widths = (8,)
    formats = ("compressed-tensors", "fp8")

    def named(self, found: re.Match[str]) -> Spec:
        return TiledFloatSpec(int(found[1]), int(found[2]))

    def spec(self, asked: GridRequest) -> Spec:
        return TiledFloatSpec(*_BLOCK)

    def listed(self) -> list[tuple[str, str]]:
        return [("fp8-128x128", "253 floats (E4M3); 8.002 bits per weight")]

    def fit(self, weight: Tensor, spec: TiledFloatSpec, how: Fitting) -> TiledFloatGrid:
        """As `float8.fit` for rows; scales are exact in the type they are stored in."""
        width = weight.shape[1]
        weigh = torch.ones(width, device=weight.device) if how.importance is None else how.importance.to(torch.float32)
        scales = []
        for strip in torch.split(weight, spec.rows):
            tiles, shares = (_tiles(part, spec.columns) for part in (strip, weigh.expand_as(strip)))
            best = best_scales(tiles, shares, how.clip, how.scale_dtype or torch.float16)
            scales.append(best.T.expand(len(strip), -1))
        return TiledFloatGrid(spec, torch.cat(scales))

    def restored(self, spec: TiledFloatSpec, width: int, parts: Mapping[str, Tensor]) -> TiledFloatGrid:
        return TiledFloatGrid(spec, parts["scale"].to(torch.float32))


GRID = TiledFloats()


def _tiles(strip: Tensor, columns: int) -> Tensor:
    """The weights [tiles, rows * columns] of each tile of rows [rows, in], filled up with zeros."""
    full = torch.nn.functional.pad(strip, (0, -strip.shape[1] % columns))
    return full.view(len(strip), -1, columns).transpose(0, 1).flatten(1)
