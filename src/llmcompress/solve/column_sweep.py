"""The column sweep of optimal brain surgery: decide a column, make up for its error in the columns after it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded, Grid, Rescale
from llmcompress.grids.scales import between

Choose = Callable[[int, Tensor, Tensor], None]


def obs_sweep(columns: Tensor, ahead: Tensor, choose: Choose, block_size: int = 128, inner: int = 16) -> None:
    """Decide all columns in order; `columns` [in, out] (a column is contiguous) is overwritten on the way.

    ahead [in, in]: of `inverse_factor` in the same order. choose(j, column [out], error [out]) decides what column j
    becomes and writes what it differs by into `error`. Updates are exact but lazy: within `inner` columns at once,
    within `block_size` after each inner block, to the rest after each block (GPTQ, arXiv:2210.17323, section 3.3; both
    sizes change speed only).
    """

    def decide(start: int, errors: Tensor) -> None:
        stop = start + len(errors)
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

    by_blocks(columns, ahead, decide, block_size)


def by_blocks(columns: Tensor, ahead: Tensor, decide: Callable[[int, Tensor], None], block_size: int) -> None:
    """Decide block by block; `columns` [in, out] after a block are updated for it at once.

    decide(start, errors [<= block_size, out]): of the columns from `start` on, writes what they differ by.
    """
    for start, stop, errors in _blocks(columns, block_size):
        decide(start, errors)
        if stop < len(columns):
            columns[stop:].addmm_(ahead[start:stop, stop:].T, errors, alpha=-1)


def move_by_blocks(gradient: Tensor, square: Tensor, decide: Callable[[int, Tensor], None], block_size: int) -> None:
    """Move values block by block; all of their `gradient` [in, out] follows each block, before it and within it too.

    square [in, in]: the Gram matrix of the columns, symmetric. decide(start, moves [<= block_size, out]): as in
    `by_blocks`; it leaves the gradient as it is.
    """
    for start, stop, moves in _blocks(gradient, block_size):
        decide(start, moves)
        gradient.addmm_(square[start:stop].T, moves, alpha=-1)


def _blocks(columns: Tensor, size: int) -> Iterator[tuple[int, int, Tensor]]:
    """First column of each block, the one after its last, and memory for what is decided of it [some, out]."""
    count = len(columns)
    for start in range(0, count, size):
        stop = min(start + size, count)
        yield start, stop, torch.empty(stop - start, columns.shape[1], dtype=columns.dtype, device=columns.device)


def in_order(matrix: Tensor, order: Tensor) -> Tensor:
    """The columns of a matrix [out, in] as rows [in, out], in `order`."""
    return matrix.T.contiguous().index_select(0, order)  # a gather across rows would take twice the time


def as_stored(columns: Tensor, order: Tensor) -> Tensor:
    """The matrix [out, in] whose columns `in_order` gave; a view of memory of its own."""
    return columns.index_select(0, torch.argsort(order)).T


def coded_levels(grid: Grid, chosen: Tensor, order: Tensor) -> Coded:
    """What levels [in, out], rows in `order`, stand for, as stored."""
    return Coded(grid.codes(as_stored(chosen, order)).contiguous(), grid)


@dataclass(frozen=True)
class Levels:
    """A grid of single codes as a `Sweeper` wants it: values are scale * level + offset.

    scale, inverse, offset [groups, out] float32; offset None for zero. index [in] int32: the group of each column, in
    order of the sweep. bounds [groups, out]: the least and the largest level, where they are whole numbers or, where
    float8 says so, floats of 8 bits. table [levels] or [out, levels]: others, in ascending order; between: their
    midpoints.
    """

    scale: Tensor
    inverse: Tensor
    offset: Tensor | None
    index: Tensor
    bounds: tuple[Tensor, Tensor] | None
    float8: bool = False
    table: Tensor | None = None
    between: Tensor | None = None

    @classmethod
    def of(cls, grid: Grid, order: Tensor) -> "Levels":
        """Those of a grid whose columns are taken in `order` [in]."""
        scale = grid.scale.T.contiguous()  # a group's scales are contiguous
        offset, table = grid.offset, grid.table
        common = (
            scale,
            torch.where(scale == 0, 0.0, 1 / scale),
            None if offset is None else offset.T.contiguous(),
            grid.group_index[order].to(torch.int32),
        )
        if table is not None:
            return cls(*common, None, False, table, between(table).contiguous())
        low, high = (bound.T.contiguous() for bound in grid.bounds)
        return cls(*common, (low, high), grid.float8)


class Sweeper(Protocol):
    """Decides whole blocks of columns in one go, which saves a dozen calls from Python for each column.

    All tensors are contiguous; keep [in, out] is as in `gptq_codes`.
    """

    @property
    def columns(self) -> int:
        """Of a block at most."""
        ...

    def takes(self, columns: Tensor, steps: Levels) -> bool:
        """Whether it works where a tensor is, on such levels."""
        ...

    def round_block(
        self,
        columns: Tensor,
        levels: Tensor,
        keep: Tensor | None,
        ahead: Tensor,
        steps: Levels,
        start: int,
        errors: Tensor,
    ) -> None:
        """GPTQ: write levels and errors [some, out] of `columns` [in, out] from `start` on."""
        ...

    def move_block(
        self,
        slopes: Tensor,
        levels: Tensor,
        keep: Tensor | None,
        ahead: Tensor,
        curve: Tensor,
        steps: Levels,
        start: int,
        moves: Tensor,
    ) -> None:
        """Descent: move `levels` [in, out] from `start` on; write moves [some, out] of their values.

        slopes [in, out]: of the loss, by the columns before. ahead [in, in]: the Gram matrix of the columns; what lies
        below its diagonal is not looked at. curve [in]: 1 over the diagonal of the Gram matrix.
        """
        ...

    @property
    def rescale(self) -> Rescale:
        """How scales are chosen together with codes, as `rescale_` of `grids/snapping.py` has it."""
        ...
