"""The nearest of a few levels for many values at once: one look into a table in place of a binary search.

The range of the midpoints between levels is cut into equal cells of which none holds two midpoints. A value's cell says
the level below, and the midpoint from which on it is the next. All is exact: no midpoint lies so near to the edge of
its cell that the rounding of a value's place could matter.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from llmcompress.grids.scales import between
from llmcompress.lazy import Tensor, torch

_EDGE = 0.01  # of a cell: what no midpoint lies within; places are rounded by less than 1e-4 of one
_MOST_CELLS = 1024


class LevelTable(NamedTuple):
    """Levels in ascending order, by cells.

    first: where the first cell begins. per_unit: cells for each unit of a value. below [cells] uint8: index of the
    level of a value that is less than the cell's midpoint. midpoint [cells] float32: NaN where there is none.
    levels [levels] float32.
    """

    first: float
    per_unit: float
    below: Tensor
    midpoint: Tensor
    levels: Tensor

    def codes(self, values: Tensor) -> Tensor:
        """Indices uint8 of the levels nearest to float32 values of any shape; one between two goes to the upper."""
        flat = values.reshape(-1)
        places = (flat - self.first).mul_(self.per_unit).clamp_(0, len(self.below) - 1)
        cells = places.to(torch.int32).clamp_min_(0)  # what is no number would have none
        above = flat >= self.midpoint.index_select(0, cells)
        return self.below.index_select(0, cells).add_(above).view(values.shape)

    def nearest(self, values: Tensor) -> Tensor:
        """Those levels themselves, float32."""
        return self.levels.index_select(0, self.codes(values).view(-1).to(torch.int32)).view(values.shape)


@cache
def level_table(levels: tuple[float, ...], device: torch.device) -> LevelTable:
    """The table of at most 256 levels, two or more, in ascending order."""
    ascending = torch.tensor(levels, dtype=torch.float32)
    midpoints = between(ascending)
    exact = midpoints.double()
    span = max(float(exact[-1] - exact[0]), 1e-6)
    cells = 32
    while True:
        per_unit = cells / (1.1 * span)
        first = float(exact[0] - 0.37 / per_unit)
        places = (exact - first) * per_unit
        held, part = places.floor().long(), places % 1
        if bool((held.diff() > 0).all()) and bool(((part > _EDGE) & (part < 1 - _EDGE)).all()):
            break
        cells += 1
        if cells > _MOST_CELLS:
            raise ValueError(f"levels lie too near to one another for {_MOST_CELLS} cells: {levels}")
    midpoint = torch.full((cells,), torch.nan)
    midpoint[held] = midpoints
    below = torch.searchsorted(held, torch.arange(cells)).to(torch.uint8)  # midpoints in the cells before
    return LevelTable(first, per_unit, below.to(device), midpoint.to(device), ascending.to(device))
