"""Descent after GPTQ: re-fit scales and move single codes that the greedy sweep chose, both on the full Gram matrix.

The sweep decides each column once, with scales fitted before it began. Both steps here lower
tr((W - Q) H (W - Q)^T) row by row and never raise it: scales by least squares for fixed codes, codes by coordinate
descent for fixed scales (QuantEase, arXiv:2309.01885, with blocked lazy updates as in GPTQ).
"""

from functools import partial

import torch
from torch import Tensor

from llmcompress.grids.blocks import BlockGrid
from llmcompress.grids.codebook import CodebookGrid
from llmcompress.grids.coded import Coded
from llmcompress.grids.float8 import FloatGrid
from llmcompress.grids.int8 import Int8Grid
from llmcompress.grids.integer import IntegerGrid
from llmcompress.grids.nf4 import Nf4Grid
from llmcompress.grids.progressive import ProgressiveGrid
from llmcompress.solve.block_descent import refit_blocks
from llmcompress.solve.codebook import refit_table
from llmcompress.solve.column_sweep import Sweeper, by_blocks
from llmcompress.solve.gptq import Steps
from llmcompress.solve.progressive import refit_progressive

Scaled = IntegerGrid | FloatGrid | Nf4Grid | Int8Grid


class Refiner:
    """What refining needs of a Gram matrix, whatever the rows: hessian [in, in], order of columns [in]."""

    def __init__(self, hessian: Tensor, order: Tensor) -> None:
        self.hessian, self.order = hessian, order
        ordered = hessian[order][:, order]
        self.curve = 1.0 / ordered.diagonal()
        self.inverse = self.curve.tolist()
        self.ahead = ordered.triu_(1)  # rows: how a move of a column bends the gradients of the columns after it

    def refine(
        self,
        weight: Tensor,
        coded: Coded,
        scale_dtype: torch.dtype,
        rounds: int,
        keep: Tensor | None = None,
        sweeper: Sweeper | None = None,
    ) -> Coded:
        """`rounds` of scales, then codes; scales once more. weight [out, in]. keep, sweeper: as in `gptq_codes`."""
        if rounds == 0:
            return coded
        target = weight @ self.hessian
        for _ in range(rounds):
            coded = self._refit(coded, target, scale_dtype)
            coded = self.descend_codes(coded, target, keep, sweeper=sweeper)
        return self._refit(coded, target, scale_dtype)

    def _refit(self, coded: Coded, target: Tensor, scale_dtype: torch.dtype) -> Coded:
        if isinstance(coded.grid, BlockGrid):
            return refit_blocks(coded.codes, coded.grid, self.hessian, target)
        if isinstance(coded.grid, CodebookGrid):
            return refit_table(coded.codes, coded.grid, self.hessian, target)
        if isinstance(coded.grid, ProgressiveGrid):
            return refit_progressive(
                coded.codes, coded.grid, *scale_loss(coded.codes, coded.grid, self.hessian, target)
            )
        return refit_scales(coded.codes, coded.grid, self.hessian, target, scale_dtype)

    def descend_codes(
        self,
        coded: Coded,
        target: Tensor,
        keep: Tensor | None = None,
        block_size: int = 128,
        inner: int = 16,
        sweeper: Sweeper | None = None,
    ) -> Coded:
        """One pass of exact coordinate descent over the codes, columns in order. target [out, in]: W H.

        The gradient H (w - q) of the columns ahead is kept up to date lazily, in two levels as in the sweep.
        """
        steps = Steps(coded.grid)
        before = coded.grid.levels(coded.codes).T[self.order].contiguous()  # [in, out]
        gradient = (target - coded.decode() @ self.hessian).T[self.order].contiguous()
        whole = steps.whole(self.order)
        if sweeper and sweeper.takes(gradient) and whole is not None:
            decide = partial(sweeper.move_block, gradient, before, keep, self.ahead, self.curve, whole)
            by_blocks(gradient, self.ahead, decide, sweeper.columns)
            return steps.coded(before, self.order)
        groups = coded.grid.group_index[self.order].tolist()
        after = torch.empty_like(before)

        def descend(start: int, moves: Tensor) -> None:
            stop = start + len(moves)
            for low in range(start, stop, inner):
                high = min(low + inner, stop)
                near, moved = gradient[low:high], moves[low - start : high - start]
                views = (near, before[low:high], after[low:high], moved, self.ahead[low:high, low:high])
                for j, (slope, old, new, move, share) in enumerate(
                    zip(*(view.unbind(0) for view in views), strict=True), low
                ):
                    group = groups[j]
                    torch.addcmul(old, slope, steps.inverse[group], value=self.inverse[j], out=new)
                    steps.snap(new, group)
                    if keep is not None:
                        torch.lerp(old, new, keep[j], out=new)  # what is gone stays where it is
                    torch.sub(new, old, out=move).mul_(steps.scale[group])
                    near.addr_(share, move, alpha=-1)
                if high < stop:
                    gradient[high:stop].addmm_(self.ahead[low:high, high:stop].T, moved, alpha=-1)

        by_blocks(gradient, self.ahead, descend, block_size)
        return steps.coded(after, self.order)


def row_loss(weight: Tensor, coded: Coded, hessian: Tensor) -> Tensor:
    """Squared output error of each row [out]: (w - q) H (w - q)^T."""
    delta = coded.decode().sub_(weight)
    return ((delta @ hessian) * delta).sum(dim=1)


def refit_scales(codes: Tensor, grid: Scaled, hessian: Tensor, target: Tensor, scale_dtype: torch.dtype) -> Coded:
    """Least-squares scales of every row for its codes; rows that would not gain keep theirs. target [out, in]: W H."""
    square, linear = scale_loss(codes, grid, hessian, target)
    rows, groups = linear.shape
    ridge = 1e-4 * square.diagonal(dim1=1, dim2=2).mean(dim=1).clamp_min(1e-30)  # groups whose codes are all zero
    eye = torch.eye(groups, device=codes.device)
    solved = torch.linalg.solve(square + ridge[:, None, None] * eye, linear + ridge[:, None] * grid.scale)
    everywhere = torch.ones(rows, dtype=torch.bool, device=codes.device)
    scale = grid.rescaled(torch.where(torch.isfinite(solved), solved, grid.scale), everywhere, scale_dtype).scale

    def loss(s: Tensor) -> Tensor:
        return (torch.einsum("rgh,rh->rg", square, s) - 2 * linear).mul_(s).sum(dim=1)

    return Coded(codes, grid.rescaled(scale, loss(scale) < loss(grid.scale), scale_dtype))


def scale_loss(codes: Tensor, grid: Scaled | ProgressiveGrid, hessian: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A [out, groups, groups] and b [out, groups] of s^T A s - 2 b^T s, what a row's scales s [groups] cost.

    With C the codes of a row spread over its groups [in, groups], A = C^T H C and b = C^T H w. target [out, in]: W H.
    """
    groups = grid.scale.shape[1]
    centred = grid.levels(codes)
    if bool((grid.group_index.diff() < 0).any()):  # groups in another order: columns of a group side by side
        together = torch.argsort(grid.group_index, stable=True)
        centred, target = centred[:, together], target[:, together]
        hessian = hessian[together][:, together]
    rows, width = centred.shape
    size = width // groups
    linear = (centred * target).view(rows, groups, size).sum(dim=2)  # [out, groups]
    square = torch.empty(rows, groups, groups, device=centred.device)
    for group in range(groups):
        start = group * size
        right = (centred[:, start : start + size] @ hessian[start : start + size, start:]).mul_(centred[:, start:])
        square[:, group, group:] = right.view(rows, groups - group, size).sum(dim=2)
        square[:, group:, group] = square[:, group, group:]
    return square, linear
