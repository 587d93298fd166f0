"""Floats of 8 bits as others ship them: E4M3 codes times one scale per tile of a matrix, read and never chosen.

Tiles begin at the first row and column and are cut off where the matrix ends, so the last of them may not be full.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from llmcompress.errors import RecipeError
from llmcompress.grids.base import Spec
from llmcompress.grids.coded import Grid
from llmcompress.grids.grid_type import GridType
from llmcompress.lazy import Tensor, torch


@dataclass(frozen=True)
class TiledFloatSpec(Spec):
    """w = scale * code, one scale for each tile of `rows` outputs and `columns` inputs."""

    rows: int
    columns: int

    type: ClassVar[str] = "fp8-tiles"
    bits: ClassVar[int] = 8
    symmetric: ClassVar[bool] = True
    joins_rows: ClassVar[bool] = True
    rounds_at_once: ClassVar[bool] = False

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
class TiledFloatGrid(Grid):
    """The grid of a matrix [out, in]: scale [out, column tiles] float32, the same for all rows of a tile."""

    spec: TiledFloatSpec
    scale: Tensor

    by_row: ClassVar[Mapping[str, str | None]] = {"scale": None}
    whole_levels: ClassVar[bool] = False

    def levels(self, codes: Tensor) -> Tensor:
        return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)

    def encode(self, weight: Tensor) -> Tensor:
        nearest = (weight / self._spread(weight.shape[1])).clamp_(-448.0, 448.0).nan_to_num_()
        return nearest.to(torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        return self.levels(codes).mul_(self._spread(codes.shape[1]))

    def numbers(self, codes: Tensor) -> bool:
        return not bool((codes & 0x7F == 0x7F).any())

    def _spread(self, width: int) -> Tensor:
        return self.scale.repeat_interleave(self.spec.columns, dim=1)[:, :width]


class TiledFloats(GridType):
    """Floats of 8 bits times a scale of their tile."""

    name = "fp8-tiles"
    place = 97
    pattern = r"fp8-(\d+)x(\d+)"
    chosen = False

    def named(self, found: re.Match[str]) -> Spec:
        return TiledFloatSpec(int(found[1]), int(found[2]))

    def restored(self, spec: TiledFloatSpec, width: int, parts: Mapping[str, Tensor]) -> TiledFloatGrid:
        return TiledFloatGrid(spec, parts["scale"].to(torch.float32))


GRID = TiledFloats()
