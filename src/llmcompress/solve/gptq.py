"""GPTQ on a fitted grid (Frantar et al., 2022, arXiv:2210.17323, algorithm 1)."""

from functools import partial

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded, Grid
from llmcompress.grids.snapping import snap_
from llmcompress.solve.column_sweep import Levels, Sweeper, by_blocks, coded_levels, in_order, obs_sweep
from llmcompress.solve.damping import Factor
from llmcompress.solve.scripted_sweep import ScriptedSweeper
from llmcompress.solve.sparsegpt import ChosenMask, FixedMask
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
    columns, steps = in_order(weight, order), Levels.of(grid, order)
    chosen = torch.empty_like(columns)
    if isinstance(mask, ChosenMask):
        _round_as_chosen(columns, chosen, factor, steps, mask)
    else:
        by = sweeper if sweeper and sweeper.takes(columns, steps) else ScriptedSweeper(block_size)
        decide = partial(by.round_block, columns, chosen, None if mask is None else mask.keep, factor.ahead, steps)
        by_blocks(columns, factor.ahead, decide, by.columns)
    return coded_levels(grid, chosen, order)


def _round_as_chosen(columns: Tensor, chosen: Tensor, factor: Factor, steps: Levels, mask: ChosenMask) -> None:
    """Round columns [in, out] one by one to levels `chosen`, as zeros where the mask, chosen meanwhile, says so."""
    groups, levels = steps.index.tolist(), chosen.unbind(0)

    def choose(j: int, column: Tensor, error: Tensor) -> None:
        group, level, kept = groups[j], levels[j], mask.at(j, columns)
        if steps.offset is None:
            value = column * kept
        else:
            offset = steps.offset[group]
            value = torch.lerp(-offset, column.sub_(offset), kept)
        torch.mul(value, steps.inverse[group], out=level)
        snap_(level, group, steps.bounds, steps.float8, steps.table, steps.between)
        torch.addcmul(column, level, steps.scale[group], value=-1, out=error)

    obs_sweep(columns, factor.ahead, choose, *mask.sizes)
