"""The column sweep of optimal brain surgery: decide a column, make up for its error in the columns after it."""

from collections.abc import Callable

import torch
from torch import Tensor

Choose = Callable[[int, Tensor], Tensor]


def obs_sweep(columns: Tensor, upper: Tensor, choose: Choose, block_size: int = 128, inner: int = 32) -> None:
    """Decide all columns in order; `columns` [in, out] (a column is contiguous) is overwritten on the way.

    upper [in, in]: U of `inverse_factor` in the same order. choose(j, column [out]) returns what the column becomes.
    Updates are exact but lazy: within `inner` columns at once, within `block_size` after each inner block, to the rest
    after each block (GPTQ, arXiv:2210.17323, section 3.3; both sizes change speed only).
    """
    size = columns.shape[0]
    diagonal = upper.diagonal().tolist()
    for start in range(0, size, block_size):
        stop = min(start + block_size, size)
        errors = torch.empty(stop - start, columns.shape[1], dtype=columns.dtype, device=columns.device)
        for low in range(start, stop, inner):
            high = min(low + inner, stop)
            for j in range(low, high):
                error = (columns[j] - choose(j, columns[j])).div_(diagonal[j])
                errors[j - start] = error
                if j + 1 < high:
                    columns[j + 1 : high].addr_(upper[j, j + 1 : high], error, alpha=-1)
            if high < stop:
                columns[high:stop].addmm_(upper[low:high, high:stop].T, errors[low - start : high - start], alpha=-1)
        if stop < size:
            columns[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
