"""A table of 16 values times the scale of a block, as others ship them: read and never chosen.

Blocks are counted through the whole matrix and may begin within a row; groups are the longest runs of inputs that lie
in one block in every row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from llmcompress.grids.base import Spec
from llmcompress.grids.coded import Grid
from llmcompress.grids.grid_type import GridType
from llmcompress.lazy import Tensor, torch


@dataclass(frozen=True)
class BlockTableSpec(Spec):
    """w = scale * table[code]. kind: what the table is called. group_size: inputs of a row with one scale."""

    kind: str
    group_size: int

    type: ClassVar[str] = "block-table"
    bits: ClassVar[int] = 4
    symmetric: ClassVar[bool] = True
    joins_rows: ClassVar[bool] = True
    rounds_at_once: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"{self.kind}-g{self.group_size}"

    def bits_per_weight(self, in_features: int) -> float:
        """Bits per weight with a scale of 32 bits for each group; blocks may be larger than those."""
        return self.bits + 32 / self.group_size


@dataclass(frozen=True)
class BlockTableGrid(Grid):
    """The grid of a matrix [out, in]: values [16] float32 in the order of codes, and scale [out, groups]."""

    spec: BlockTableSpec
    values: Tensor
    scale: Tensor

    by_row: ClassVar[Mapping[str, str | None]] = {"scale": None}
    shared: ClassVar[Mapping[str, str | None]] = {"values": None}

    def levels(self, codes: Tensor) -> Tensor:
        return self.values[codes.long()]

    def encode(self, weight: Tensor) -> Tensor:
        ratio = weight / self._spread().clamp_min(torch.finfo(torch.float32).tiny)
        return (ratio.unsqueeze(-1) - self.values).abs_().argmin(-1).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        return self.levels(codes).mul_(self._spread())

    def _spread(self) -> Tensor:
        return self.scale.repeat_interleave(self.spec.group_size, dim=1)


class BlockTables(GridType):
    """16 values of a table times a scale of their block."""

    name = "block-table"
    place = 96
    pattern = r"([nf][fp]4)-g(\d+)"
    chosen = False

    def named(self, found: re.Match[str]) -> Spec:
        return BlockTableSpec(found[1], int(found[2]))

    def restored(self, spec: BlockTableSpec, width: int, parts: Mapping[str, Tensor]) -> BlockTableGrid:
        return BlockTableGrid(spec, parts["values"], parts["scale"])


GRID = BlockTables()
