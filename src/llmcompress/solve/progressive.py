"""Both scales of progressive groups by descent on the full Gram matrix, for fixed codes."""

from dataclasses import replace

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded
from llmcompress.grids.progressive import ProgressiveGrid, float16_scale, most_multiples

_ROUNDS = 2


def refit_progressive(codes: Tensor, grid: ProgressiveGrid, square: Tensor, linear: Tensor) -> Coded:
    """Better s0 and s1 for codes [out, in]; rows that would not gain keep theirs.

    square [out, groups, groups] and linear [out, groups]: A and b of the loss s^T A s - 2 b^T s of scales s = s1 * s0.
    s0 has a closed form; each s1 is the whole number nearest to the best, the others held, so that neither raises the
    loss but by rounding s0 to float16. Decoded whole numbers stay within -127 ... 127.
    """
    most = most_multiples(_magnitudes(codes, grid))
    diagonal = square.diagonal(dim1=1, dim2=2)
    multiple, scale = grid.multiple.clone(), grid.row_scale
    for _ in range(_ROUNDS):
        scale = _row_scale(square, linear, multiple, scale)
        product = torch.einsum("rgh,rh->rg", square, multiple)
        for group in range(multiple.shape[1]):
            old, curve = multiple[:, group].clone(), diagonal[:, group]
            wish = old + (linear[:, group] / scale[:, 0] - product[:, group]) / curve.clamp_min(1e-30)
            new = torch.where(curve > 0, torch.minimum(wish.round().clamp_min(1), most[:, group]), old)
            product += square[:, :, group] * (new - old).unsqueeze(1)
            multiple[:, group] = new
    scale = _row_scale(square, linear, multiple, scale)

    def loss(s: Tensor) -> Tensor:
        return (torch.einsum("rgh,rh->rg", square, s) - 2 * linear).mul_(s).sum(dim=1)

    better = (loss(scale * multiple) < loss(grid.scale)).unsqueeze(1)
    row_scale = torch.where(better, scale, grid.row_scale)
    return Coded(codes, replace(grid, row_scale=row_scale, multiple=torch.where(better, multiple, grid.multiple)))


def _magnitudes(codes: Tensor, grid: ProgressiveGrid) -> Tensor:
    """The largest magnitude of a level in each group [out, groups]."""
    index = grid.group_index.expand_as(codes)
    return torch.zeros_like(grid.multiple).scatter_reduce_(1, index, grid.levels(codes).abs(), "amax")


def _row_scale(square: Tensor, linear: Tensor, multiple: Tensor, scale: Tensor) -> Tensor:
    """s0 [out, 1] by least squares; the old one where it would not be positive."""
    along = (linear * multiple).sum(1, keepdim=True)
    curve = torch.einsum("rg,rgh,rh->r", multiple, square, multiple).unsqueeze(1)
    return float16_scale(torch.where((along > 0) & (curve > 0), along / curve.clamp_min(1e-30), scale))
