"""Descent after GPTQ: re-fit scales and move single codes that the greedy sweep chose, both on the full Gram matrix.

The sweep decides each column once, with scales fitted before it began. Both steps here lower
tr((W - Q) H (W - Q)^T) row by row and never raise it: scales by least squares for fixed codes, codes by coordinate
descent for fixed scales (QuantEase, arXiv:2309.01885, with blocked lazy updates as in GPTQ).
"""

from dataclasses import replace

import torch
from torch import Tensor

from llmcompress.grids.integer import Coded, storable


def refine(
    weight: Tensor, coded: Coded, hessian: Tensor, order: Tensor, scale_dtype: torch.dtype, rounds: int
) -> Coded:
    """`rounds` of scales, then codes; scales once more. weight [out, in], hessian [in, in], order of columns [in]."""
    if rounds == 0:
        return coded
    target = weight @ hessian
    for _ in range(rounds):
        coded = refit_scales(coded, hessian, target, scale_dtype)
        coded = descend_codes(coded, hessian, target, order)
    return refit_scales(coded, hessian, target, scale_dtype)


def row_loss(weight: Tensor, coded: Coded, hessian: Tensor) -> Tensor:
    """Squared output error of each row [out]: (w - q) H (w - q)^T."""
    delta = coded.decode().sub_(weight)
    return ((delta @ hessian) * delta).sum(dim=1)


def refit_scales(coded: Coded, hessian: Tensor, target: Tensor, scale_dtype: torch.dtype) -> Coded:
    """Least-squares scales of every row for its codes; rows that would not gain keep theirs. target [out, in]: W H.

    With C the codes of a row spread over its groups [in, groups], the loss is s^T (C^T H C) s - 2 s^T C^T H w + const.
    """
    grid = coded.grid
    groups = grid.scale.shape[1]
    together = torch.argsort(grid.group_index, stable=True)  # columns of a group side by side
    centred = (coded.codes.to(torch.float32) - grid.zero[:, grid.group_index])[:, together]
    hessian = hessian[together][:, together]
    rows, width = centred.shape
    size = width // groups
    linear = (centred * target[:, together]).view(rows, groups, size).sum(dim=2)  # [out, groups]
    square = torch.empty(rows, groups, groups, device=centred.device)
    for group in range(groups):
        start = group * size
        right = (centred[:, start : start + size] @ hessian[start : start + size, start:]).mul_(centred[:, start:])
        square[:, group, group:] = right.view(rows, groups - group, size).sum(dim=2)
        square[:, group:, group] = square[:, group, group:]
    ridge = 1e-4 * square.diagonal(dim1=1, dim2=2).mean(dim=1).clamp_min(1e-30)  # groups whose codes are all zero
    eye = torch.eye(groups, device=centred.device)
    solved = torch.linalg.solve(square + ridge[:, None, None] * eye, linear + ridge[:, None] * grid.scale)
    scale = storable(torch.where(torch.isfinite(solved), solved, grid.scale), scale_dtype)

    def loss(s: Tensor) -> Tensor:
        return (torch.einsum("rgh,rh->rg", square, s) - 2 * linear).mul_(s).sum(dim=1)

    gains = loss(scale) < loss(grid.scale)
    return replace(coded, grid=replace(grid, scale=torch.where(gains[:, None], scale, grid.scale)))


def descend_codes(
    coded: Coded, hessian: Tensor, target: Tensor, order: Tensor, block_size: int = 128, inner: int = 16
) -> Coded:
    """One pass of exact coordinate descent over the codes, columns in `order` [in]. target [out, in]: W H.

    The gradient H (w - q) of the columns ahead is kept up to date lazily, in two levels as in the sweep.
    """
    grid = coded.grid
    scale = grid.scale.T.contiguous()
    groups = grid.group_index[order].tolist()
    top = grid.spec.levels - 1
    ordered = hessian[order][:, order]
    codes = coded.codes.T[order].to(torch.float32)  # [in, out]
    gradient = (target - coded.decode() @ hessian).T[order]
    inverse = (1.0 / ordered.diagonal()).tolist()
    size = codes.shape[0]
    for start in range(0, size, block_size):
        stop = min(start + block_size, size)
        moves = torch.empty(stop - start, codes.shape[1], device=codes.device)
        for low in range(start, stop, inner):
            high = min(low + inner, stop)
            for j in range(low, high):
                step = scale[groups[j]]
                best = (gradient[j] * inverse[j]).div_(step).add_(codes[j]).round_().clamp_(0, top)
                torch.mul(best.sub(codes[j]), step, out=moves[j - start])
                codes[j] = best
                if j + 1 < high:
                    gradient[j + 1 : high].addr_(ordered[j + 1 : high, j], moves[j - start], alpha=-1)
            if high < stop:
                gradient[high:stop].addmm_(ordered[high:stop, low:high], moves[low - start : high - start], alpha=-1)
        if stop < size:
            gradient[stop:].addmm_(ordered[stop:, start:stop], moves, alpha=-1)
    stored = torch.empty_like(codes)
    stored[order] = codes
    return replace(coded, codes=stored.T.to(torch.uint8).contiguous())
