"""Block grids: values by the formula, codes that are the nearest, parts that are all there is."""

import pytest
import torch

from llmcompress.grids.blocks import BLOCK_TYPES, IQ4_LEVELS, BlockGrid
from llmcompress.grids.coded import Coded
from llmcompress.grids.grid_type import restored
from llmcompress.grids.scales import float16

ALL = pytest.mark.parametrize("spec", BLOCK_TYPES.values(), ids=BLOCK_TYPES)


def some_grid(spec, rows=3, blocks=2, seed=0):
    """A grid with scales of either sign, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    groups = blocks * spec.groups_per_block

    def whole():
        return torch.randint(spec.multiples[0], spec.multiples[1] + 1, (rows, groups), generator=generator).float()

    def half():
        return torch.randn(rows, blocks, generator=generator).half().float()

    many = spec.multiples is not None
    d = half()
    d[0, 0] = 0
    return BlockGrid(
        spec,
        d,
        whole() if many else None,
        half() if spec.minima else None,
        whole() if many and spec.minima else None,
    )


def level(spec, code):
    return IQ4_LEVELS[code] if spec.curved else code - spec.middle


def formula(grid, row, channel, code):
    """Value of a code in float64, from the stored numbers alone."""
    spec = grid.spec
    block, group = channel // spec.block_size, channel // spec.group_size
    scale = grid.d[row, block].item() * (1 if grid.multiples is None else grid.multiples[row, group].item())
    least = 0.0
    if grid.dmin is not None:
        least = grid.dmin[row, block].item() * (1 if grid.minima is None else grid.minima[row, group].item())
    return scale * level(spec, code) - least


@ALL
def test_values_follow_the_formula(spec):
    grid = some_grid(spec)
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(spec.lowest, spec.levels, (3, 2 * spec.block_size), generator=generator).to(torch.uint8)
    values = grid.decode(codes)
    for row in range(3):
        for channel in range(0, codes.shape[1], 7):
            expected = formula(grid, row, channel, int(codes[row, channel]))
            assert values[row, channel].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@ALL
def test_codes_are_the_nearest_of_all(spec):
    grid = some_grid(spec)
    generator = torch.Generator().manual_seed(2)
    reach = grid.decode(torch.full((3, 2 * spec.block_size), spec.levels - 1, dtype=torch.uint8)).abs() + 1
    weight = reach * torch.randn(3, 2 * spec.block_size, generator=generator)
    codes = grid.encode(weight)
    every = torch.stack(
        [grid.decode(torch.full_like(codes, code)) for code in range(spec.lowest, spec.levels)]
    ).double()
    nearest = (every - weight.double()).abs().amin(0)
    found = (grid.decode(codes).double() - weight.double()).abs()
    assert int(codes.min()) >= spec.lowest
    assert torch.all(found <= nearest * (1 + 1e-6) + 1e-6)


@ALL
def test_rows_and_stacks_and_what_is_stored(spec):
    grid = some_grid(spec, rows=5)
    codes = grid.encode(torch.randn(5, 2 * spec.block_size, generator=torch.Generator().manual_seed(3)))
    coded = Coded(codes, grid)
    halves = Coded.stacked([coded.rows(slice(0, 2)), coded.rows(slice(2, 5))])
    again = restored(spec, coded.stored())
    for other in (halves, again, coded.to("cpu")):
        assert torch.equal(other.codes, codes)
        assert torch.equal(other.decode(), coded.decode())
    assert torch.equal(coded.rows(torch.tensor([4, 1])).decode(), coded.decode()[[4, 1]])


def test_levels_of_iq4_are_those_of_gguf():
    quants = pytest.importorskip("gguf.quants")
    assert tuple(quants.IQ4_NL.kvalues) == IQ4_LEVELS


def test_units_stay_within_float16():
    values = torch.tensor([1e9, -1e9, 65519.0, 1e-9, 6e-8, 0.1])
    rounded = float16(values)
    assert rounded.tolist()[:4] == [65504.0, -65504.0, 65504.0, 0.0]
    assert torch.equal(rounded, rounded.half().float())
