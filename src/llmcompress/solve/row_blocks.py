"""Blocks of rows: rows of a matrix are independent of one another, so that some of them are solved at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch

from llmcompress.solve.column_sweep import Sweeper
from llmcompress.workers import SERIAL, Workers

R = TypeVar("R")
_ALIGNED = 64  # rows that a block is a multiple of, for the sake of speed

SOLVED_ROWS = 1536  # at once by a thread: with fewer, the calls for each column would cost more than their arithmetic
SOLVED_ON_GPU = 1 << 24  # weights at once on a GPU, whose memory this bounds
LOOKED_AT = 1 << 22  # weights at once that are compared with what became of them


def solved_rows(width: int, gpu: bool) -> int:
    """Rows of matrices with `width` columns that are solved at once."""
    return max(SOLVED_ROWS, SOLVED_ON_GPU // width) if gpu else SOLVED_ROWS


class HasRows(Protocol):
    """A matrix, or what gives the rows of one."""

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        ...


def looked_at(matrix: HasRows) -> Iterator[slice]:
    """The rows of a matrix in blocks of `LOOKED_AT` weights."""
    rows, width = matrix.shape
    step = max(1, LOOKED_AT // max(width, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


@dataclass(frozen=True)
class RowBlocks:
    """How the rows of a matrix are cut, and who works on them. gpu: whether matrices lie on one.

    sweeper: what decides blocks of columns there; None for torch.
    """

    workers: Workers
    gpu: bool = False
    sweeper: Sweeper | None = None

    def map(self, function: Callable[[slice], R], matrix: HasRows, most: int | None = None) -> list[R]:
        """`function` of every block of rows of a matrix [out, in], in order; all threads and ranks share them.

        most: rows of a block; None for as many as are solved at once.
        """
        rows, width = matrix.shape
        step = even_block(rows, most or solved_rows(width, self.gpu))
        blocks = (slice(start, start + step) for start in range(0, rows, step))
        return self.workers.distribute(partial(function, block) for block in blocks)


def even_block(rows: int, most: int) -> int:
    """Rows of a block, so that none has more than `most` and an even number of them, all but alike, two can share."""
    count = -(-rows // most)
    even = -(-rows // (count + count % 2)) if count > 1 else rows
    return min(-(-even // _ALIGNED) * _ALIGNED, most)


SERIAL_BLOCKS = RowBlocks(SERIAL)
"""Blocks that one thread solves, on a processor."""
