"""SparseGPT (Frantar and Alistarh, 2023, arXiv:2301.00774): drop weights, make up for them in the columns after."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompress.solve.column_sweep import as_stored, in_order, obs_sweep
from llmcompress.solve.damping import Factor
from llmcompress.solve.prune import Pattern, smallest, smallest_of_each

INNER, OUTER = 16, 128  # columns between two updates of those near by, and of all


class FixedMask:
    """A mask that is decided. keep [in, out]: 1 for weights that stay, 0 for others; columns in order of the sweep."""

    def __init__(self, keep: Tensor) -> None:
        self.keep = keep


class ChosenMask(FixedMask):
    """A mask that is chosen as the sweep comes to a block, from weights that make up for all blocks before.

    The score of a weight is w^2 / U_jj^2, the error that is left when the columns after it make up for it (equation 3).
    """

    def __init__(self, choice: "MaskChoice", pivots: Tensor, rows: int) -> None:
        super().__init__(torch.empty(len(pivots), rows, device=pivots.device))
        self.choice, self.pivots = choice, pivots
        # a block must be up to date when it is chosen from
        if choice.pattern is None:
            self.sizes = choice.columns * max(1, OUTER // choice.columns), INNER
        else:
            inner = choice.columns * max(1, INNER // choice.columns)
            self.sizes = inner * max(1, OUTER // inner), inner

    def at(self, j: int, columns: Tensor) -> Tensor:
        """Of column j [out], as the sweep comes to it. columns [in, out]: all of them, as they are by then."""
        size = self.choice.columns
        if j % size == 0:
            self.choose(columns[j : j + size], j)
        return self.keep[j]

    def choose(self, near: Tensor, j: int) -> None:
        """Decide for the columns `near` [some, out], of which j is the first."""
        score = (near / self.pivots[j : j + len(near), None]).square_()
        pattern, sparsity = self.choice.pattern, self.choice.sparsity
        if pattern is not None:
            dropped = smallest_of_each(score.T, pattern).T
        else:
            dropped = smallest(score.view(1, -1), round(sparsity * score.numel())).view_as(score)
        torch.logical_not(dropped, out=self.keep[j : j + len(near)])


@dataclass(frozen=True)
class MaskChoice:
    """How masks are chosen: of `block_size` columns the share `sparsity` of all their weights goes, or by pattern."""

    sparsity: float
    pattern: Pattern | None
    block_size: int = OUTER

    @property
    def columns(self) -> int:
        """Chosen from at once."""
        return self.block_size if self.pattern is None else self.pattern.of

    def order(self, energy: Tensor, by_energy: bool = True) -> Tensor:
        """In which columns are decided: by energy [in], unless runs of stored columns belong together."""
        if self.pattern is not None or not by_energy:
            return torch.arange(len(energy), device=energy.device)
        return torch.argsort(energy, descending=True, stable=True)

    def mask(self, pivots: Tensor, rows: int) -> ChosenMask:
        """A mask to be chosen. pivots [in]: of the factor, in order."""
        return ChosenMask(self, pivots, rows)

    def guess(self, columns: Tensor, pivots: Tensor) -> Tensor:
        """The mask [in, out] that would be chosen if nothing was made up for; columns [in, out] in order."""
        mask = self.mask(pivots, columns.shape[1])
        for j in range(0, len(pivots), self.columns):
            mask.choose(columns[j : j + self.columns], j)
        return mask.keep


def sparse_weights(weight: Tensor, factor: Factor, order: Tensor, mask: ChosenMask) -> Tensor:
    """Weight [out, in] with zeros where `mask` says so, all others moved to make up for them.

    factor: of the mean Gram matrix with rows and columns in `order` [in], the order in which columns are decided.
    """
    columns = in_order(weight, order)

    def choose(j: int, column: Tensor, error: Tensor) -> None:
        torch.addcmul(column, column, mask.at(j, columns), value=-1, out=error)

    obs_sweep(columns, factor.ahead, choose, *mask.sizes)
    return as_stored(columns.mul_(mask.keep), order).contiguous()
