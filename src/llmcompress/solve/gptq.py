"""GPTQ on a fitted integer grid (Frantar et al., 2022, arXiv:2210.17323, algorithm 1)."""

import torch
from torch import Tensor

from llmcompress.grids.integer import Coded, IntegerGrid
from llmcompress.solve.damping import Factor
from llmcompress.solve.sweep import obs_sweep


def gptq_codes(weight: Tensor, grid: IntegerGrid, factor: Factor, order: Tensor, block_size: int = 128) -> Coded:
    """Round weight [out, in] to a grid fitted beforehand, column by column in `order` [in].

    factor: of the mean Gram matrix with rows and columns in `order`. Groups belong to stored columns, so the order of
    processing needs no group index in any file.
    """
    columns = weight.T[order].contiguous()
    steps = Steps(grid)
    groups = grid.group_index[order].tolist()
    centred = torch.empty_like(columns)
    rows = centred.unbind(0)

    def choose(j: int, column: Tensor, error: Tensor) -> None:
        group, code = groups[j], rows[j]
        torch.mul(column, steps.inverse[group], out=code)
        torch.clamp(code.round_(), steps.low[group], steps.high[group], out=code)
        torch.addcmul(column, code, steps.scale[group], value=-1, out=error)

    obs_sweep(columns, factor.ahead, choose, block_size)
    return steps.coded(centred, order)


class Steps:
    """A grid as column loops want it: per group, scale, its inverse, and the least and largest centred code [out]."""

    def __init__(self, grid: IntegerGrid) -> None:
        self.grid = grid
        scale, zero = grid.scale.T.contiguous(), grid.zero.T.contiguous()  # a group's scales are contiguous
        self.scale, self.inverse = scale.unbind(0), scale.reciprocal().unbind(0)
        self.low, self.high = (-zero).unbind(0), (grid.spec.levels - 1 - zero).unbind(0)

    def coded(self, centred: Tensor, order: Tensor) -> Coded:
        """Codes less their zero points [in, out], rows in `order`, as stored."""
        stored = torch.empty_like(centred)
        stored[order] = centred
        codes = stored.T + self.grid.zero[:, self.grid.group_index]
        return Coded(codes.to(torch.uint8).contiguous(), self.grid)
