"""GPTQ and descent where several columns are rounded as one, to points of a table (`Spec.together` of them)."""

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded, Grid
from llmcompress.solve.column_sweep import by_blocks, coded_levels, in_order, move_by_blocks
from llmcompress.solve.damping import Factor


def codes_together(weight: Tensor, grid: Grid, factor: Factor, order: Tensor, block_size: int) -> Coded:
    """`gptq_codes` of such a grid: block LDLQ (Tseng et al., QuIP#, arXiv:2402.04396, section 4.1).

    Within a unit, what is left of an error once later columns have made up for it is `left` @ (values - rounded), so
    that the loss of a unit is a quadratic form, and the unit is rounded to the point that is nearest by it.
    """
    size = grid.spec.together
    columns = in_order(weight, order)
    chosen = torch.empty_like(columns)
    scales, groups = _by_unit(grid, order)
    eye = torch.eye(size, device=columns.device)

    def decide(start: int, errors: Tensor) -> None:
        stop = start + len(errors)
        for low in range(start, stop, size):
            high = low + size
            near, group = columns[low:high], groups[low // size]
            scale = scales[group]
            chain = factor.ahead[low:high, low:high].triu(1).T + eye
            left = torch.linalg.solve_triangular(chain, eye, upper=False)
            metric = left.T @ (left * factor.pivots[low:high, None] ** -2)
            chosen[low:high] = grid.snapped(_units(near, scale).T, metric, group).T
            wrong = torch.mm(left, near - chosen[low:high] * scale, out=errors[low - start : high - start])
            if high < stop:
                columns[high:stop].addmm_(factor.ahead[low:high, high:stop].T, wrong, alpha=-1)

    by_blocks(columns, factor.ahead, decide, max(1, block_size // size) * size)
    return coded_levels(grid, chosen, order)


def descend_together(coded: Coded, gradient: Tensor, ordered: Tensor, order: Tensor, block_size: int) -> Coded:
    """`Refiner.descend_codes` of such a grid: every unit to the point that is best for it alone, or none is better.

    gradient [in, out], which follows the moves, and ordered [in, in]: as a `Refiner` has them.
    """
    grid = coded.grid
    size = grid.spec.together
    levels = in_order(grid.levels(coded.codes), order)
    scales, groups = _by_unit(grid, order)

    def descend(start: int, moves: Tensor) -> None:
        stop = start + len(moves)
        slopes = gradient[start:stop].clone()
        for low in range(start, stop, size):
            high = low + size
            group = groups[low // size]
            old, scale, metric = levels[low:high], scales[group], ordered[low:high, low:high]
            best = old + _units(torch.linalg.solve(metric, slopes[low - start : high - start]), scale)
            new = grid.snapped(best.T, metric, group).T
            before, after = best - old, best - new
            better = ((metric @ after) * after).sum(0) < ((metric @ before) * before).sum(0)
            new = torch.where(better, new, old)
            move = torch.mul(new - old, scale, out=moves[low - start : high - start])
            levels[low:high] = new
            if high < stop:
                slopes[high - start :].addmm_(ordered[low:high, high:stop].T, move, alpha=-1)

    move_by_blocks(gradient, ordered, descend, max(1, block_size // size) * size)
    return coded_levels(grid, levels, order)


def _by_unit(grid: Grid, order: Tensor) -> tuple[Tensor, list[int]]:
    """Scales [groups, out], and the group of each unit in `order`."""
    return grid.scale.T.contiguous(), grid.group_index[order][:: grid.spec.together].tolist()


def _units(values: Tensor, scale: Tensor) -> Tensor:
    """Values [size, out] in units of scales [out]; zero where there is none."""
    return torch.where(scale == 0, 0.0, values / scale)
