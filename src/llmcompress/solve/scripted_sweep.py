"""Blocks of columns of sweep and descent, decided on whole numbers by loops that TorchScript runs."""

import torch
from torch import Tensor

from llmcompress.scripted import scripted
from llmcompress.solve.column_sweep import IntegerLevels

_NEAR = 16  # columns that follow each column at once; the others of a block follow after so many


class ScriptedSweeper:
    """A `Sweeper` that works wherever torch does. columns: of a block."""

    def __init__(self, columns: int = 128) -> None:
        self.columns = columns

    def takes(self, columns: Tensor) -> bool:
        return True

    def round_block(
        self,
        columns: Tensor,
        levels: Tensor,
        keep: Tensor | None,
        ahead: Tensor,
        steps: IntegerLevels,
        start: int,
        errors: Tensor,
    ) -> None:
        stop = start + len(errors)
        _round_columns(
            columns[start:stop],
            levels[start:stop],
            None if keep is None else keep[start:stop],
            ahead[start:stop, start:stop],
            steps.scale,
            steps.inverse,
            steps.low,
            steps.high,
            steps.offset,
            steps.index[start:stop].tolist(),
            errors,
            _NEAR,
        )

    def move_block(
        self,
        slopes: Tensor,
        levels: Tensor,
        keep: Tensor | None,
        ahead: Tensor,
        curve: Tensor,
        steps: IntegerLevels,
        start: int,
        moves: Tensor,
    ) -> None:
        stop = start + len(moves)
        _move_columns(
            slopes[start:stop].clone(),
            levels[start:stop],
            None if keep is None else keep[start:stop],
            ahead[start:stop, start:stop],
            curve[start:stop].tolist(),
            steps.scale,
            steps.inverse,
            steps.low,
            steps.high,
            steps.index[start:stop].tolist(),
            moves,
            _NEAR,
        )


@scripted
def _round_columns(
    columns: Tensor,
    levels: Tensor,
    keep: Tensor | None,
    ahead: Tensor,
    scale: Tensor,
    inverse: Tensor,
    low: Tensor,
    high: Tensor,
    offset: Tensor | None,
    groups: list[int],
    errors: Tensor,
    near: int,
) -> None:
    """Round the columns [some, out] of a block one by one: write levels and errors, move the columns after each."""
    count = len(columns)
    for first in range(0, count, near):
        last = min(first + near, count)
        for j in range(first, last):
            column, level, error, group = columns[j], levels[j], errors[j], groups[j]
            value = column
            if offset is not None:
                column.sub_(offset[group])
            if keep is not None:
                value = column * keep[j] if offset is None else torch.lerp(-offset[group], column, keep[j])
            torch.mul(value, inverse[group], out=level)
            torch.clamp(level.round_(), low[group], high[group], out=level)
            torch.addcmul(column, level, scale[group], value=-1, out=error)
            if j + 1 < last:
                columns[j + 1 : last].addr_(ahead[j, j + 1 : last], error, alpha=-1)
        if last < count:
            columns[last:].addmm_(ahead[first:last, last:].t(), errors[first:last], alpha=-1)


@scripted
def _move_columns(
    slopes: Tensor,
    levels: Tensor,
    keep: Tensor | None,
    ahead: Tensor,
    curve: list[float],
    scale: Tensor,
    inverse: Tensor,
    low: Tensor,
    high: Tensor,
    groups: list[int],
    moves: Tensor,
    near: int,
) -> None:
    """Move the levels [some, out] of a block to where the loss is least, column by column; write moves of values."""
    count = len(slopes)
    new = torch.empty_like(moves[0])
    for first in range(0, count, near):
        last = min(first + near, count)
        for j in range(first, last):
            level, move, group = levels[j], moves[j], groups[j]
            torch.addcmul(level, slopes[j], inverse[group], value=curve[j], out=new)
            torch.clamp(new.round_(), low[group], high[group], out=new)
            if keep is not None:
                torch.lerp(level, new, keep[j], out=new)  # what is gone stays where it is
            torch.sub(new, level, out=move).mul_(scale[group])
            level.copy_(new)
            if j + 1 < last:
                slopes[j + 1 : last].addr_(ahead[j, j + 1 : last], move, alpha=-1)
        if last < count:
            slopes[last:].addmm_(ahead[first:last, last:].t(), moves[first:last], alpha=-1)
