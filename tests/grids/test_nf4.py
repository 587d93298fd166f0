"""NF4: its levels and map by their definitions, its scales by brute force."""

import pytest
import torch

from llmcompress.grids.coded import Coded
from llmcompress.grids.grid_type import restored
from llmcompress.grids.nf4 import LEVELS, Nf4Grid, Nf4Spec, dynamic_map, fit
from llmcompress.validate.table_codes import _dynamic_values, _normal_levels

PLAIN, DOUBLE = Nf4Spec(double=False), Nf4Spec(double=True)


def weights(rows=12, width=192, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.02


def test_levels_and_map_are_those_of_their_definitions():
    assert torch.allclose(torch.tensor(LEVELS, dtype=torch.float64), torch.from_numpy(_normal_levels()), atol=1e-7)
    assert torch.allclose(dynamic_map().double(), torch.from_numpy(_dynamic_values()), rtol=1e-6, atol=0)
    assert dynamic_map().unique().numel() == 256


@pytest.mark.parametrize("spec", [PLAIN, DOUBLE])
def test_codes_are_the_nearest_of_all_sixteen(spec):
    weight = weights()
    grid = fit(weight, spec)
    every = torch.tensor(LEVELS)[:, None, None] * grid.scale.repeat_interleave(64, dim=1)
    least = (every - weight).abs().amin(dim=0)
    assert torch.allclose((grid.decode(grid.encode(weight)) - weight).abs(), least, atol=1e-8)


def test_searched_scales_lose_least_of_many():
    weight, importance = weights(), torch.rand(192, generator=torch.Generator().manual_seed(1)) + 0.1

    def lost(grid):
        return ((grid.decode(grid.encode(weight)) - weight).square() * importance).view(12, 3, 64).sum(-1)

    largest = fit(weight, PLAIN, clip="minmax")
    best = torch.stack([lost(Nf4Grid(PLAIN, largest.scale * share)) for share in torch.linspace(0.5, 1.1, 121)]).amin(
        dim=0
    )
    found = lost(fit(weight, PLAIN, importance=importance))
    assert (found <= lost(largest) + 1e-12).all()
    assert found.sum() <= 1.03 * best.sum()


def test_double_quantisation_counts_nested_blocks_through_the_rows():
    weight = weights(rows=100)  # 300 blocks: one nested block and a part
    grid, plain = fit(weight, DOUBLE, clip="minmax"), fit(weight, PLAIN, clip="minmax").scale
    offset = plain.mean()
    moved = (plain - offset).reshape(-1)
    assert torch.equal(grid.common, offset.expand(100, 1))
    assert torch.equal(grid.nested.reshape(-1)[:256], moved[:256].abs().amax().expand(256))
    assert torch.equal(grid.nested.reshape(-1)[256:], moved[256:].abs().amax().expand(44))
    step = dynamic_map().diff().max() / 2
    assert ((grid.scale - plain).abs().reshape(-1) <= step * grid.nested.reshape(-1) * 1.0001).all()


@pytest.mark.parametrize("spec", [PLAIN, DOUBLE])
def test_a_zero_matrix_and_parts_of_rows_come_back(spec):
    nothing = fit(torch.zeros(4, 64), spec)
    assert torch.equal(nothing.decode(nothing.encode(torch.zeros(4, 64))), torch.zeros(4, 64))
    weight = weights()
    grid = fit(weight, spec)
    coded = Coded(grid.encode(weight), grid)
    assert torch.equal(restored(spec, coded.stored()).decode(), coded.decode())
    halves = [coded.rows(slice(0, 5)), coded.rows(slice(5, 12))]
    assert torch.equal(Coded.stacked(halves).decode(), coded.decode())


@pytest.mark.parametrize("spec", [PLAIN, DOUBLE])
def test_scales_change_in_the_rows_that_are_named_alone(spec):
    grid = fit(weights(), spec)
    rows = torch.arange(12) % 2 == 0
    moved = grid.rescaled(grid.scale * 0.9, rows, torch.float16)
    assert torch.equal(moved.scale[~rows], grid.scale[~rows])
    assert not torch.equal(moved.scale[rows], grid.scale[rows])
    assert torch.equal(moved.rescaled(moved.scale, rows, torch.float16).scale, moved.scale)
