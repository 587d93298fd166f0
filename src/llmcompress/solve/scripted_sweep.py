"""Blocks of columns of sweep and descent, decided by loops that TorchScript runs."""

import torch
from torch import Tensor

from llmcompress.grids.snapping import rescale_, snapped_
from llmcompress.scripted import scripted
from llmcompress.solve.column_sweep import Levels

_NEAR = 16  # columns that follow each column at once; the others of a block follow after so many


class ScriptedSweeper:
    """A `Sweeper` that works wherever torch does. columns: of a block."""

    def __init__(self, columns: int = 128) -> None:
        self.columns = columns

    rescale = staticmethod(rescale_)

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
    """Round the columns [some, out] of a block one by one: write levels and errors, move the columns after each.

    ahead [some, some]: zero up to its diagonal, so that columns before move by nothing.
    """
    count, scales, inverses = len(columns), scale.unbind(0), inverse.unbind(0)
    for first in range(0, count, near):
        last = min(first + near, count)
        block = columns[first:last]
        shares = ahead[first:last, first:last].unbind(0)
        # views are made at once: for few rows they would cost more than arithmetic
        parts = zip(block.unbind(0), levels[first:last].unbind(0), errors[first:last].unbind(0), shares)  # noqa: B905 (TorchScript)
        for j, (column, level, error, share) in enumerate(parts, first):
            value, group = column, groups[j]
            if offset is not None:
                column.sub_(offset[group])
            if keep is not None:
                value = column * keep[j] if offset is None else torch.lerp(-offset[group], column, keep[j])
            torch.mul(value, inverses[group], out=level)
            snapped_(level, group, bounds, float8, table, between)
            torch.addcmul(column, level, scales[group], value=-1, out=error)
            block.addr_(share, error, alpha=-1)
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
    count, scales, inverses = len(slopes), scale.unbind(0), inverse.unbind(0)
    new = torch.empty_like(moves[0])
    for first in range(0, count, near):
        last = min(first + near, count)
        block = slopes[first:last]
        shares = ahead[first:last, first:last].triu(1).unbind(0)
        parts = zip(block.unbind(0), levels[first:last].unbind(0), moves[first:last].unbind(0), shares)  # noqa: B905 (TorchScript)
        for j, (slope, level, move, share) in enumerate(parts, first):
            group = groups[j]
            torch.addcmul(level, slope, inverses[group], value=curve[j], out=new)
            snapped_(new, group, bounds, float8, table, between)
            if keep is not None:
                torch.lerp(level, new, keep[j], out=new)  # what is gone stays where it is
            torch.sub(new, level, out=move).mul_(scales[group])
            level.copy_(new)
            block.addr_(share, move, alpha=-1)
        if last < count:
            slopes[last:].addmm_(ahead[first:last, last:].t(), moves[first:last], alpha=-1)
