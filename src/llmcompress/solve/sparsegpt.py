"""SparseGPT (Frantar and Alistarh, 2023, arXiv:2301.00774): drop weights, make up for them in the columns after."""

from collections.abc import Callable

import torch
from torch import Tensor

from llmcompress.solve.damping import Factor
from llmcompress.solve.prune import Pattern, smallest, smallest_of_each
from llmcompress.solve.sweep import obs_sweep

Held = Callable[[int, Tensor], Tensor]
"""held(j, columns [in, out]): which weights of column j are kept [out], as the sweep comes to it; 1 or 0, float32."""


def choosing(pivots: Tensor, sparsity: float, pattern: Pattern | None, block_size: int = 128) -> Held:
    """Masks that are chosen as the sweep comes to a block, from weights that make up for all blocks before.

    The score of a weight is w^2 / U_jj^2, the error that is left when the columns after it make up for it (equation 3).
    Of `block_size` columns the share `sparsity` of all their weights goes, or of each m columns those that the pattern
    says.
    """
    kept: list[Tensor] = []
    size = block_size if pattern is None else pattern.of

    def held(j: int, columns: Tensor) -> Tensor:
        if j % size == 0:
            near = columns[j : j + size]
            score = (near / pivots[j : j + size, None]).square_()
            if pattern is None:
                dropped = smallest(score.view(1, -1), round(sparsity * score.numel())).view_as(score)
            else:
                dropped = smallest_of_each(score.T, pattern).T
            kept[:] = (~dropped).to(columns.dtype).unbind(0)
        return kept[j % size]

    return held


def sparse_weights(weight: Tensor, factor: Factor, order: Tensor, held: Held, block_size: int = 128) -> Tensor:
    """Weight [out, in] with zeros where `held` says so, all others moved to make up for them.

    factor: of the mean Gram matrix with rows and columns in `order` [in], the order in which columns are decided.
    """
    columns = weight.T[order].contiguous()
    keeps = torch.empty_like(columns)

    def choose(j: int, column: Tensor, error: Tensor) -> None:
        keep = held(j, columns)
        keeps[j] = keep
        torch.addcmul(column, column, keep, value=-1, out=error)

    obs_sweep(columns, factor.ahead, choose, block_size)
    found = torch.empty_like(columns)
    found[order] = columns.mul_(keeps)
    return found.T.contiguous()
