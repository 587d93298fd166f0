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
    scale, zero = grid.scale.T.contiguous(), grid.zero.T.contiguous()  # [groups, out]: a group's scales are contiguous
    groups = grid.group_index[order].tolist()
    top = grid.spec.levels - 1
    codes = torch.empty(columns.shape, dtype=torch.uint8, device=weight.device)

    def choose(j: int, column: Tensor) -> Tensor:
        step, shift = scale[groups[j]], zero[groups[j]]
        code = (column / step).add_(shift).round_().clamp_(0, top)
        codes[j] = code
        return code.sub_(shift).mul_(step)

    obs_sweep(columns, factor.upper, choose, block_size)
    stored = torch.empty_like(codes)
    stored[order] = codes
    return Coded(stored.T.contiguous(), grid)
