"""Descent after GPTQ: re-fit scales and move single codes that the greedy sweep chose, both on the full Gram matrix.

The sweep decides each column once, with scales fitted before it began. Both steps here lower
tr((W - Q) H (W - Q)^T) row by row and never raise it: codes by coordinate descent for fixed scales (QuantEase,
arXiv:2309.01885, with blocked lazy updates as in GPTQ), scales by least squares for fixed codes. Both go by the same
gradient, which is multiplied out once for each round.
"""

from functools import partial

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded
from llmcompress.solve.column_sweep import Sweeper, as_stored, in_order, move_by_blocks
from llmcompress.solve.damping import permuted
from llmcompress.solve.gptq import ColumnRounder
from llmcompress.solve.scripted_sweep import ScriptedSweeper
from llmcompress.solve.together import descend_together


class Refiner:
    """What refining needs of a Gram matrix, whatever the rows: hessian [in, in], order of columns [in]."""

    def __init__(self, hessian: Tensor, order: Tensor) -> None:
        self.hessian, self.order = hessian, order
        self.ordered = permuted(hessian, order)
        self.curve = 1.0 / self.ordered.diagonal()
        self.inverse = self.curve.tolist()

    def refine(
        self,
        weight: Tensor,
        coded: Coded,
        scale_dtype: torch.dtype,
        rounds: int,
        keep: Tensor | None = None,
        sweeper: Sweeper | None = None,
    ) -> Coded:
        """`rounds` of codes, then scales. weight [out, in]. keep, sweeper: as in `gptq_codes`."""
        for _ in range(rounds):
            coded, gradient = self.descend_codes(coded, self.gradient(weight, coded), keep, sweeper=sweeper)
            slopes = as_stored(gradient, self.order)
            del gradient
            coded = coded.grid.refit(coded.codes, self.hessian, slopes, scale_dtype)
        return coded

    def gradient(self, weight: Tensor, coded: Coded) -> Tensor:
        """H (w - q) [in, out] of every row of weight [out, in], columns in order.

        The product is that of the difference: that of H w and H q would lose what is small beside both.
        """
        return (self.hessian @ coded.decode().sub_(weight).neg_().T).index_select(0, self.order)

    def descend_codes(
        self,
        coded: Coded,
        gradient: Tensor,
        keep: Tensor | None = None,
        block_size: int = 128,
        inner: int = 16,
        sweeper: Sweeper | None = None,
    ) -> tuple[Coded, Tensor]:
        """One pass of exact coordinate descent over the codes, columns in order; and the gradient after it.

        gradient [in, out]: as `gradient` gives it; its memory is that of the one returned. It follows moves of earlier
        columns lazily, in two levels as in the sweep, and all moves once a block is done.
        """
        if coded.grid.spec.together > 1:
            return descend_together(coded, gradient, self.ordered, self.order, block_size), gradient
        rounder = ColumnRounder(coded.grid)
        levels = in_order(coded.grid.levels(coded.codes), self.order)
        whole = rounder.integer_levels(self.order)
        if whole is not None:
            by = sweeper if sweeper and sweeper.takes(gradient) else ScriptedSweeper(block_size)
            decide = partial(by.move_block, gradient, levels, keep, self.ordered, self.curve, whole)
            move_by_blocks(gradient, self.ordered, decide, by.columns)
            return rounder.coded(levels, self.order), gradient
        groups = coded.grid.group_index[self.order].tolist()

        def descend(start: int, moves: Tensor) -> None:
            stop = start + len(moves)
            slopes, new = gradient[start:stop].clone(), torch.empty_like(moves[0])
            ahead = self.ordered[start:stop, start:stop].triu(1)
            for low in range(0, len(moves), inner):
                high = low + inner
                near, moved = slopes[low:high], moves[low:high]
                views = near, levels[start + low : min(start + high, stop)], moved, ahead[low:high, low:high]
                for j, (slope, old, move, share) in enumerate(
                    zip(*(view.unbind(0) for view in views), strict=True), start + low
                ):
                    group = groups[j]
                    torch.addcmul(old, slope, rounder.inverse[group], value=self.inverse[j], out=new)
                    rounder.snap(new, group)
                    if keep is not None:
                        torch.lerp(old, new, keep[j], out=new)  # what is gone stays where it is
                    torch.sub(new, old, out=move).mul_(rounder.scale[group])
                    old.copy_(new)
                    near.addr_(share, move, alpha=-1)
                if start + high < stop:
                    slopes[high:].addmm_(ahead[low:high, high:].T, moved, alpha=-1)

        move_by_blocks(gradient, self.ordered, descend, block_size)
        return rounder.coded(levels, self.order), gradient


def row_loss(weight: Tensor, coded: Coded, hessian: Tensor) -> Tensor:
    """Squared output error of each row [out]: (w - q) H (w - q)^T."""
    delta = coded.decode().sub_(weight)
    return ((delta @ hessian) * delta).sum(dim=1)
