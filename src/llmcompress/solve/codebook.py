"""Tables of codebooks by least squares on the full Gram matrix, for fixed codes."""

from dataclasses import replace

import torch
from torch import Tensor

from llmcompress.grids.blocks import float16
from llmcompress.grids.codebook import CodebookGrid
from llmcompress.grids.coded import Coded


def refit_table(codes: Tensor, grid: CodebookGrid, hessian: Tensor, target: Tensor) -> Coded:
    """Better tables for codes uint8 [out, in]; rows that would not gain keep theirs. target [out, in]: W H.

    With C the indicator of a row's codes [in, levels], the loss is t^T (C^T H C) t - 2 t^T C^T H w + const. The codes
    of a row whose new values are in another order are renumbered.
    """
    rows, levels = grid.values.shape
    index = codes.long()
    linear = target.new_zeros(rows, levels).scatter_add_(1, index, target)
    square = target.new_zeros(rows, levels, levels)
    for level in range(levels):
        square[:, level].scatter_add_(1, index, (codes == level).to(hessian.dtype) @ hessian)
    ridge = 1e-5 * square.diagonal(dim1=1, dim2=2).mean(dim=1).clamp_min(1e-30)  # values that no code stands for
    eye = torch.eye(levels, device=codes.device)
    solved = torch.linalg.solve(square + ridge[:, None, None] * eye, linear + ridge[:, None] * grid.values)
    values = float16(torch.where(torch.isfinite(solved), solved, grid.values))

    def loss(t: Tensor) -> Tensor:
        return (torch.einsum("rkl,rl->rk", square, t) - 2 * linear).mul_(t).sum(dim=1)

    values = torch.where((loss(values) < loss(grid.values))[:, None], values, grid.values)
    ascending, order = values.sort(dim=1, stable=True)
    places = torch.empty_like(order).scatter_(1, order, torch.arange(levels, device=codes.device).expand_as(order))
    return Coded(places.gather(1, index).to(torch.uint8), replace(grid, values=ascending))
