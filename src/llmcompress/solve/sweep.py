"""The column sweep of optimal brain surgery: decide a column, make up for its error in the columns after it."""

from collections.abc import Callable

import torch
from torch import Tensor

Choose = Callable[[int, Tensor, Tensor], None]


def obs_sweep(columns: Tensor, ahead: Tensor, choose: Choose, block_size: int = 128, inner: int = 16) -> None:
    """Decide all columns in order; `columns` [in, out] (a column is contiguous) is overwritten on the way.

    ahead [in, in]: of `inverse_factor` in the same order. choose(j, column [out], error [out]) decides what column j
    becomes and writes what it differs by into `error`. Updates are exact but lazy: within `inner` columns at once,
    within `block_size` after each inner block, to the rest after each block (GPTQ, arXiv:2210.17323, section 3.3; both
    sizes change speed only).
    """
    size = columns.shape[0]
    for start in range(0, size, block_size):
        stop = min(start + block_size, size)
        errors = torch.empty(stop - start, columns.shape[1], dtype=columns.dtype, device=columns.device)
        for low in range(start, stop, inner):
            high = min(low + inner, stop)
            near = columns[low:high]
            # views are made at once: for these few thousand numbers a column, calls cost more than arithmetic
            shares = ahead[low:high, low:high].unbind(0)
            wrong = errors[low - start : high - start]
            for j, (column, error, share) in enumerate(zip(near.unbind(0), wrong.unbind(0), shares, strict=True), low):
                choose(j, column, error)
                near.addr_(share, error, alpha=-1)
            if high < stop:
                columns[high:stop].addmm_(ahead[low:high, high:stop].T, wrong, alpha=-1)
        if stop < size:
            columns[stop:].addmm_(ahead[start:stop, stop:].T, errors, alpha=-1)
