"""GPTQ on a fitted grid (Frantar et al., 2022, arXiv:2210.17323, algorithm 1)."""

from functools import partial

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded, Grid
from llmcompress.grids.scales import between
from llmcompress.solve.column_sweep import IntegerLevels, Sweeper, as_stored, by_blocks, in_order, obs_sweep
from llmcompress.solve.damping import Factor
from llmcompress.solve.scripted_sweep import ScriptedSweeper
from llmcompress.solve.sparsegpt import FixedMask
from llmcompress.solve.together import codes_together


def gptq_codes(
    weight: Tensor,
    grid: Grid,
    factor: Factor,
    order: Tensor,
    block_size: int = 128,
    mask: FixedMask | None = None,
    sweeper: Sweeper | None = None,
) -> Coded:
    """Round weight [out, in] to a grid fitted beforehand, column by column in `order` [in].

    factor: of the mean Gram matrix with rows and columns in `order`. Groups belong to stored columns, so the order of
    processing needs no group index in any file. mask: which weights are gone; they are rounded as zeros, and what they
    were is made up for like any rounding error. sweeper: decides whole blocks of the columns that it takes.
    """
    if grid.spec.together > 1:
        return codes_together(weight, grid, factor, order, block_size)
    columns = in_order(weight, order)
    rounder = ColumnRounder(grid)
    chosen = torch.empty_like(columns)
    whole = rounder.integer_levels(order)
    if whole is not None and (mask is None or type(mask) is FixedMask):
        by = sweeper if sweeper and sweeper.takes(columns) else ScriptedSweeper(block_size)
        decide = partial(by.round_block, columns, chosen, None if mask is None else mask.keep, factor.ahead, whole)
        by_blocks(columns, factor.ahead, decide, by.columns)
        return rounder.coded(chosen, order)
    groups = grid.group_index[order].tolist()
    rows = chosen.unbind(0)

    sizes = (block_size,) if mask is None else mask.sizes

    def choose(j: int, column: Tensor, error: Tensor) -> None:
        group, level = groups[j], rows[j]
        kept = None if mask is None else mask.at(j, columns)
        value, offset = column, None if rounder.offset is None else rounder.offset[group]
        if offset is not None:
            column.sub_(offset)
        if kept is not None:
            value = column * kept if offset is None else torch.lerp(-offset, column, kept)
        torch.mul(value, rounder.inverse[group], out=level)
        rounder.snap(level, group)
        torch.addcmul(column, level, rounder.scale[group], value=-1, out=error)

    obs_sweep(columns, factor.ahead, choose, *sizes)
    return rounder.coded(chosen, order)


class ColumnRounder:
    """A grid as column loops want it: per group, scale, its inverse, and what is added to scale * level (or None).

    Loops work on levels: what a code stands for, in units of the scale.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        scale = grid.scale.T.contiguous()  # a group's scales are contiguous
        inverse = torch.where(scale == 0, 0.0, 1 / scale)
        offset = None if grid.offset is None else grid.offset.T.contiguous()
        self._values = scale, inverse, offset
        self.scale, self.inverse = scale.unbind(0), inverse.unbind(0)
        self.offset = None if offset is None else offset.unbind(0)
        self._table = grid.table
        if self._table is not None:
            self._between = between(self._table).contiguous()
        else:
            low, high = (bound.T.contiguous() for bound in grid.bounds)
            self._bounds = low, high
            self._low, self._high = low.unbind(0), high.unbind(0)

    def integer_levels(self, order: Tensor) -> IntegerLevels | None:
        """The same for columns in `order` [in], where levels are whole numbers; None where they are not."""
        if self._table is not None or not self.grid.whole_levels:
            return None
        scale, inverse, offset = self._values
        low, high = self._bounds
        return IntegerLevels(scale, inverse, low, high, offset, self.grid.group_index[order].to(torch.int32))

    def snap(self, level: Tensor, group: int) -> None:
        """Move values in units of the scale [out] to the nearest levels, in place."""
        if self._table is None:
            torch.clamp(self.grid.rounded_(level), self._low[group], self._high[group], out=level)
        elif self._table.dim() == 2:  # one for each row
            place = torch.searchsorted(self._between, level.unsqueeze(1), right=True)
            level.copy_(self._table.gather(1, place).squeeze(1))
        else:
            torch.take(self._table, torch.bucketize(level, self._between, right=True), out=level)

    def coded(self, chosen: Tensor, order: Tensor) -> Coded:
        """What levels [in, out], rows in `order`, stand for, as stored."""
        return Coded(self.grid.codes(as_stored(chosen, order)).contiguous(), self.grid)
