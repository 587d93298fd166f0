"""Progressive groups: nothing leaves int8 whatever the codes; scales and zero points by brute force."""

import pytest
import torch

from llmcompress.errors import RecipeError
from llmcompress.grids.coded import Coded
from llmcompress.grids.grid_type import restored, spec_named
from llmcompress.grids.integer import IntegerSpec
from llmcompress.grids.integer import fit as fit_integer
from llmcompress.grids.progressive import LIMIT, ProgressiveGrid, ProgressiveSpec, fit, most_multiples

SPEC = ProgressiveSpec(32)


def weights(rows=12, width=96, seed=0, tails=True):
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.02
    if tails:
        weight[:, 5] *= 8
    return weight


def lost(grid, weight, importance=None):
    error = (grid.decode(grid.encode(weight)) - weight).square()
    return (error if importance is None else error * importance).sum(1)


def test_the_codes_of_any_scale_and_zero_point_decode_to_all_that_lies_within_int8_and_to_nothing_else():
    multiple, zero = torch.cartesian_prod(torch.arange(1.0, 17), torch.arange(16.0)).T.unsqueeze(2)
    rows, wanted = len(multiple), torch.arange(-400.0, 401)
    grid = ProgressiveGrid(SPEC, torch.ones(rows, 1), multiple, zero, torch.zeros(len(wanted), dtype=torch.int64))
    codes = grid.encode(wanted.expand(rows, -1))
    decoded = grid.whole(codes)
    for row in range(rows):
        every = (torch.arange(16) - zero[row]) * multiple[row]
        assert decoded[row].unique().tolist() == every[every.abs() <= 127].tolist()
        assert torch.equal((codes[row] - zero[row]) * multiple[row], decoded[row].float())


def test_weights_that_fill_119_decode_within_int8_however_ties_go_and_120_would_leave_it():
    def most(limit, rounding):
        values = torch.arange(limit + 1)
        return max(int((rounding(values / step) * step).max()) for step in range(1, 17))

    def half_up(values):
        return (values + 0.5).floor()

    assert (most(LIMIT, torch.round), most(LIMIT, half_up)) == (121, 126)
    assert (most(LIMIT + 1, torch.round), most(LIMIT + 1, half_up)) == (128, 128)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_scales_that_cover_every_weight_need_no_clamp(size):
    weight = weights(width=256)
    grid = fit(weight, ProgressiveSpec(size), clip="minmax")
    assert torch.equal(grid.multiple, grid.multiple.round().clamp(1, 16))
    assert torch.equal(grid.zero, grid.zero.round().clamp(0, 15))
    assert torch.equal(grid.row_scale, grid.row_scale.half().float())
    assert (grid.row_scale[:, 0] * 119 / weight.abs().amax(1) - 1).abs().max() < 2**-10
    codes = grid.encode(weight)
    assert int(grid.whole(codes).abs().max()) <= 126
    step = grid.scale[:, grid.group_index]
    # zero points are whole numbers: the end of a range may lie half a step further off
    assert ((grid.decode(codes) - weight).abs() <= 1.001 * step).all()
    ordinary = (grid.decode(codes) - weight).abs() <= 0.501 * step
    assert ordinary.float().mean() > 0.95


def test_values_are_exact_products():
    weight = weights()
    grid = fit(weight, SPEC)
    codes = grid.encode(weight)
    assert torch.equal(grid.decode(codes).double(), grid.whole(codes).double() * grid.row_scale.double())
    assert torch.equal(grid.codes(grid.levels(codes)), codes)


def test_searched_ranges_lose_little_more_than_the_best_of_all_for_the_scale_of_the_row():
    weight = weights(rows=6, width=64)
    importance = torch.rand(64, generator=torch.Generator().manual_seed(1)) + 0.1
    grid = fit(weight, SPEC, importance=importance)
    best = torch.full((6, 2), torch.inf)
    for multiple in range(1, 17):
        for zero in range(16):
            every = (torch.arange(16) - zero) * multiple
            values = every[every.abs() <= 127] * grid.row_scale
            near = (weight.unsqueeze(-1) - values.unsqueeze(1)).abs().amin(-1)
            best = torch.minimum(best, (near.square() * importance).view(6, 2, 32).sum(-1))
    found = lost(grid, weight, importance)
    assert (found >= best.sum(1) * (1 - 1e-4)).all()
    assert found.sum() <= 1.05 * best.sum()
    assert (found <= lost(fit(weight, SPEC, clip="minmax"), weight, importance) * 1.01).all()


@pytest.mark.parametrize("size", [32, 64, 128])
def test_whole_scales_cost_little_beside_free_ones(size):
    weight = weights(rows=32, width=512, tails=False)
    free = fit_integer(weight, IntegerSpec(4, size, False))
    progressive = float(lost(fit(weight, ProgressiveSpec(size)), weight).sum())
    covering = float(lost(fit(weight, ProgressiveSpec(size), clip="minmax"), weight).sum())
    assert progressive < 1.06 * float(lost(free, weight).sum())
    assert progressive < 0.95 * covering


@pytest.mark.parametrize("clip", ["minmax", "search"])
def test_rows_of_nothing_and_of_one_weight_are_held(clip):
    weight = torch.zeros(3, 64)
    weight[1, 40] = -3e4
    weight[2, 7] = 1e-9
    grid = fit(weight, SPEC, clip=clip)
    value = grid.decode(grid.encode(weight))
    assert torch.equal(value[0], weight[0])
    assert float(value[1, 40]) == pytest.approx(-3e4, rel=0.08)
    assert float(value[2].abs().max()) <= 2**-24
    assert bool(grid.row_scale.isfinite().all())
    assert (grid.row_scale > 0).all()


def test_groups_may_follow_an_order():
    weight, order = weights(), torch.randperm(96, generator=torch.Generator().manual_seed(2))
    moved = fit(weight, SPEC, order=order)
    plain = fit(weight[:, order], SPEC)
    assert torch.equal(moved.decode(moved.encode(weight))[:, order], plain.decode(plain.encode(weight[:, order])))


def test_a_grid_comes_back_from_its_parts_rows_and_names():
    weight = weights()
    grid = fit(weight, SPEC)
    coded = Coded(grid.encode(weight), grid)
    assert spec_named(SPEC.name) == SPEC
    again = restored(SPEC, coded.stored())
    assert torch.equal(again.decode(), coded.decode())
    parts = [coded.rows(slice(start, start + 5)) for start in range(0, 12, 5)]
    assert torch.equal(Coded.stacked(parts).decode(), coded.decode())
    assert torch.equal(coded.to("cpu").decode(), coded.decode())
    with pytest.raises(RecipeError, match="groups of 32, 64, 128, not 48"):
        ProgressiveSpec(48)


def test_the_largest_multiple_for_a_level_is_that_of_the_definition():
    for level in range(16):
        most = max(step for step in range(1, 17) if step * level <= 127)
        assert int(most_multiples(torch.tensor(float(level)))) == most
