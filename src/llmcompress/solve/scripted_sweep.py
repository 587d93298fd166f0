"""Blocks of columns of sweep and descent, decided by loops that TorchScript runs."""

import torch
from torch import Tensor

from llmcompress.scripted import scripted
from llmcompress.solve.column_sweep import Levels

_NEAR = 16  # columns that follow each column at once; the others of a block follow after so many


class ScriptedSweeper:
    """A `Sweeper` that works wherever torch does. columns: of a block."""

    def __init__(self, columns: int = 128) -> None:
        self.columns = columns

    def takes(self, columns: Tensor, steps: Levels) -> bool:
        return True

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
        stop = start + len(errors)
        _round_columns(
            columns[start:stop],
            levels[start:stop],
            None if keep is None else keep[start:stop],
            ahead[start:stop, start:stop],
            steps.scale,
            steps.inverse,
            steps.offset,
            steps.index[start:stop].tolist(),
            steps.bounds,
            steps.float8,
            steps.table,
            steps.between,
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
        steps: Levels,
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
            steps.index[start:stop].tolist(),
            steps.bounds,
            steps.float8,
            steps.table,
            steps.between,
            moves,
            _NEAR,
        )


def _snapped_(
    level: Tensor,
    group: int,
    bounds: tuple[Tensor, Tensor] | None,
    float8: bool,
    table: Tensor | None,
    between: Tensor | None,
) -> None:
    """Move values [out] in units of their scale to the nearest levels, in place."""
    if bounds is not None:
        torch.clamp(level, bounds[0][group], bounds[1][group], out=level)  # bounds are levels: rounding stays within
        if float8:
            level.copy_(level.to(torch.float8_e4m3fn)).add_(0.0)  # zero is never negative
        else:
            level.round_()
    elif table is not None and between is not None:
        if table.dim() == 2:  # one for each row
            place = torch.searchsorted(between, level.unsqueeze(1), right=True)
            level.copy_(table.gather(1, place).squeeze(1))
        else:
            torch.take(table, torch.bucketize(level, between, right=True), out=level)


@scripted
def _round_columns(
    columns: Tensor,
    levels: Tensor,
    keep: Tensor | None,
    ahead: Tensor,
    scale: Tensor,
    inverse: Tensor,
    offset: Tensor | None,
    groups: list[int],
    bounds: tuple[Tensor, Tensor] | None,
    float8: bool,
    table: Tensor | None,
    between: Tensor | None,
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
            _snapped_(level, group, bounds, float8, table, between)
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
    groups: list[int],
    bounds: tuple[Tensor, Tensor] | None,
    float8: bool,
    table: Tensor | None,
    between: Tensor | None,
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
            _snapped_(new, group, bounds, float8, table, between)
            if keep is not None:
                torch.lerp(level, new, keep[j], out=new)  # what is gone stays where it is
            torch.sub(new, level, out=move).mul_(scale[group])
            level.copy_(new)
            if j + 1 < last:
                slopes[j + 1 : last].addr_(ahead[j, j + 1 : last], move, alpha=-1)
        if last < count:
            slopes[last:].addmm_(ahead[first:last, last:].t(), moves[first:last], alpha=-1)


snap_ = scripted(_snapped_)
