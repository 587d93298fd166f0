"""Descent after GPTQ: re-fit scales and move single codes that the greedy sweep chose, both on the full Gram matrix.

The sweep decides each column once, with scales fitted before it began. Both steps here lower
tr((W - Q) H (W - Q)^T) row by row and never raise it: scales by least squares for fixed codes, codes by coordinate
descent for fixed scales (QuantEase, arXiv:2309.01885, with blocked lazy updates as in GPTQ).
"""

from functools import partial

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded
from llmcompress.solve.column_sweep import Sweeper, by_blocks
from llmcompress.solve.gptq import ColumnRounder
from llmcompress.solve.together import descend_together


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
            coded = coded.grid.refit(coded.codes, self.hessian, target, scale_dtype)
            coded = self.descend_codes(coded, target, keep, sweeper=sweeper)
        return coded.grid.refit(coded.codes, self.hessian, target, scale_dtype)

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
        if coded.grid.spec.together > 1:
            return descend_together(coded, target, self.hessian, self.order, self.ahead, block_size)
        rounder = ColumnRounder(coded.grid)
        before = coded.grid.levels(coded.codes).T[self.order].contiguous()  # [in, out]
        reached = coded.decode() @ self.hessian
        gradient = torch.sub(target, reached, out=reached).T[self.order].contiguous()
        del reached
        whole = rounder.integer_levels(self.order)
        if sweeper and sweeper.takes(gradient) and whole is not None:
            decide = partial(sweeper.move_block, gradient, before, keep, self.ahead, self.curve, whole)
            by_blocks(gradient, self.ahead, decide, sweeper.columns)
            return rounder.coded(before, self.order)
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
                    torch.addcmul(old, slope, rounder.inverse[group], value=self.inverse[j], out=new)
                    rounder.snap(new, group)
                    if keep is not None:
                        torch.lerp(old, new, keep[j], out=new)  # what is gone stays where it is
                    torch.sub(new, old, out=move).mul_(rounder.scale[group])
                    near.addr_(share, move, alpha=-1)
                if high < stop:
                    gradient[high:stop].addmm_(self.ahead[low:high, high:stop].T, moved, alpha=-1)

        by_blocks(gradient, self.ahead, descend, block_size)
        return rounder.coded(after, self.order)


def row_loss(weight: Tensor, coded: Coded, hessian: Tensor) -> Tensor:
    """Squared output error of each row [out]: (w - q) H (w - q)^T."""
    delta = coded.decode().sub_(weight)
    return ((delta @ hessian) * delta).sum(dim=1)
