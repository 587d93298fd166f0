"""Descent after GPTQ: re-fit scales and move single codes that the greedy sweep chose, both on the full Gram matrix.

The sweep decides each column once, with scales fitted before it began. Both steps here lower
tr((W - Q) H (W - Q)^T) row by row and never raise it: codes by coordinate descent for fixed scales (QuantEase,
arXiv:2309.01885, with blocked lazy updates as in GPTQ), scales by least squares for fixed codes, or, where scales are
of a small set, together with codes. Both go by the same gradient, which is multiplied out once for each round.
"""

from functools import partial

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded
from llmcompress.solve.column_sweep import Levels, Sweeper, as_stored, coded_levels, in_order, move_by_blocks
from llmcompress.solve.damping import permuted
from llmcompress.solve.scripted_sweep import ScriptedSweeper
from llmcompress.solve.together import descend_together


class Refiner:
    """What refining needs of a Gram matrix, whatever the rows: hessian [in, in], order of columns [in]."""

    def __init__(self, hessian: Tensor, order: Tensor) -> None:
        self.hessian, self.order = hessian, order
        self.ordered = permuted(hessian, order)
        self.curve = 1.0 / self.ordered.diagonal()

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
            stay = None if keep is None else as_stored(keep, self.order)
            rescale = None if sweeper is None else sweeper.rescale
            coded = coded.grid.refit_all(coded.codes, self.hessian, slopes, scale_dtype, stay, rescale)
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
        sweeper: Sweeper | None = None,
    ) -> tuple[Coded, Tensor]:
        """One pass of exact coordinate descent over the codes, columns in order; and the gradient after it.

        gradient [in, out]: as `gradient` gives it; its memory is that of the one returned. It follows moves of earlier
        columns lazily, in two levels as in the sweep, and all moves once a block is done.
        """
        if coded.grid.spec.together > 1:
            return descend_together(coded, gradient, self.ordered, self.order, block_size), gradient
        levels, steps = in_order(coded.grid.levels(coded.codes), self.order), Levels.of(coded.grid, self.order)
        by = sweeper if sweeper and sweeper.takes(gradient, steps) else ScriptedSweeper(block_size)
        decide = partial(by.move_block, gradient, levels, keep, self.ordered, self.curve, steps)
        move_by_blocks(gradient, self.ordered, decide, by.columns)
        return coded_levels(coded.grid, levels, self.order), gradient


def row_loss(weight: Tensor, coded: Coded, hessian: Tensor) -> Tensor:
    """Squared output error of each row [out]: (w - q) H (w - q)^T."""
    delta = coded.decode().sub_(weight)
    return ((delta @ hessian) * delta).sum(dim=1)
