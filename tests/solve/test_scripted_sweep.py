"""Blocks of columns by TorchScript are what float64 makes of them by hand, one column after another."""

import numpy as np
import pytest
import torch

from llmcompress.solve.column_sweep import Levels
from llmcompress.solve.scripted_sweep import ScriptedSweeper

COLUMNS, ROWS, START, GROUPS = 37, 5, 11, 3  # of a block within a matrix; two inner blocks and a part of one


def steps(offset):
    """Levels -4 ... 3 whose scales differ by group and row."""
    generator = torch.Generator().manual_seed(0)
    scale = 0.05 + 0.1 * torch.rand(GROUPS, ROWS, generator=generator)
    index = torch.randint(0, GROUPS, (START + COLUMNS + 4,), generator=generator).to(torch.int32)
    bounds = torch.full((GROUPS, ROWS), -4.0), torch.full((GROUPS, ROWS), 3.0)
    shift = 0.1 * torch.randn(GROUPS, ROWS, generator=generator) if offset else None
    return Levels(scale, 1 / scale, shift, index, bounds)


def matrices(count):
    """Values [in, out] and a square [in, in], and which weights stay [in, out]."""
    generator = torch.Generator().manual_seed(1)
    values = 0.3 * torch.randn(count, ROWS, generator=generator)
    square = 0.2 * torch.randn(count, count, generator=generator)
    return values, square, (torch.rand(count, ROWS, generator=generator) > 0.3).to(torch.float32)


def at(part, group, row):
    return float(part[group, row])


def snapped(value, grid, group, row):
    return np.clip(np.rint(value), *(at(bound, group, row) for bound in grid.bounds))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_rounding(offset, masked):
    grid = steps(offset)
    values, square, keep = matrices(len(grid.index))
    columns, levels = values.clone(), torch.full_like(values, torch.nan)
    errors = torch.full((COLUMNS, ROWS), torch.nan)
    ScriptedSweeper().round_block(columns, levels, keep if masked else None, square, grid, START, errors)
    for row in range(ROWS):
        left = values[START : START + COLUMNS, row].double().numpy().copy()
        for j in range(COLUMNS):
            group, share = int(grid.index[START + j]), square[START + j, START : START + COLUMNS].double().numpy()
            shift = at(grid.offset, group, row) if offset else 0.0
            wanted = left[j] if not masked or keep[START + j, row] else 0.0
            level = snapped((wanted - shift) / at(grid.scale, group, row), grid, group, row)
            error = left[j] - shift - level * at(grid.scale, group, row)
            assert levels[START + j, row] == level
            assert errors[j, row] == pytest.approx(error, abs=1e-5)
            left[j + 1 :] -= share[j + 1 :] * error
    outside = [*range(START), *range(START + COLUMNS, len(values))]
    assert torch.equal(columns[outside], values[outside])
    assert levels[outside].isnan().all()


@pytest.mark.parametrize("masked", [False, True])
def test_moving(masked):
    grid = steps(offset=False)
    slopes, square, keep = matrices(len(grid.index))
    old = torch.randint(-4, 4, slopes.shape, generator=torch.Generator().manual_seed(2)).to(torch.float32)
    levels, moves = old.clone(), torch.full((COLUMNS, ROWS), torch.nan)
    curve = 0.4 + torch.rand(len(slopes), generator=torch.Generator().manual_seed(3))
    given = slopes.clone()
    ScriptedSweeper().move_block(given, levels, keep if masked else None, square, curve, grid, START, moves)
    assert torch.equal(given, slopes), "the caller updates slopes for all moves of a block at once"
    assert (levels != old).any()
    for row in range(ROWS):
        left = slopes[START : START + COLUMNS, row].double().numpy().copy()
        for j in range(COLUMNS):
            group, share = int(grid.index[START + j]), square[START + j, START : START + COLUMNS].double().numpy()
            before, scale = at(old, START + j, row), at(grid.scale, group, row)
            level = snapped(before + left[j] * float(curve[START + j]) / scale, grid, group, row)
            if masked and not keep[START + j, row]:
                level = before
            assert levels[START + j, row] == level
            assert moves[j, row] == pytest.approx((level - before) * scale, abs=1e-6)
            left[j + 1 :] -= share[j + 1 :] * (level - before) * scale
