"""Shares of work: they fit the device, cover everything once, and follow sizes alone."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from llmcompress.kernels.partition import Problem, best, candidates
from llmcompress.kernels.tensor_checks import shared_limit
from llmcompress.kernels.tiles import USUAL, TileSpec

W4 = TileSpec(4, 128, 8, torch.float16)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120"])
def test_every_problem_has_a_plan_that_fits(architecture):
    for spec, rows in product(USUAL, (1, 9, 40, 128)):
        plans = list(candidates(Problem(rows, 4096, 11008, spec), architecture, 108))
        assert plans
        for plan in plans:
            assert plan.shared <= shared_limit(architecture)
            assert plan.stages >= 2
            assert plan.blocks * (plan.shared + 1024) <= shared_limit(architecture) + 1024
            assert plan.row_blocks * 8 * plan.tiles >= rows
            assert plan.columns * 32 * plan.warps_n >= 4096
            assert plan.depth * 128 * plan.warps_k >= 11008
            assert 1 <= plan.slots <= plan.columns * plan.depth


def test_few_rows_keep_all_multiprocessors_busy():
    for outputs, inputs in ((4096, 4096), (8192, 8192), (4096, 14336), (28672, 8192)):
        plan = best(Problem(1, outputs, inputs, W4), "sm_90", 132)
        assert plan.tiles == 1
        assert plan.slots >= 0.8 * 132


def test_rows_cost_little_until_products_take_longer_than_bytes():
    costs = [best(Problem(rows, 8192, 8192, W4), "sm_90", 132).cost(132) for rows in (1, 8, 16, 32, 64, 128)]
    assert costs == sorted(costs)
    assert costs[2] < 1.3 * costs[0]


def test_sums_are_left_only_where_tiles_are_shared():
    for plan in candidates(Problem(4, 4096, 4096, W4), "sm_90", 132):
        assert (plan.partial > 0) == (plan.slots != plan.columns)


def shared_by(plan):
    """The most blocks that have units of one tile, by going through all units."""
    least, longer = divmod(plan.columns * plan.depth, plan.slots)
    owners = [block for block in range(plan.slots) for _ in range(least + (block < longer))]
    tiles = [set(owners[start : start + plan.depth]) for start in range(0, len(owners), plan.depth)]
    return max(map(len, tiles))


def test_sharers_are_those_of_the_tile_that_most_blocks_share():
    for rows, (outputs, inputs) in product((1, 16, 64), ((4096, 4096), (4096, 11008), (512, 640), (22016, 4096))):
        for plan in candidates(Problem(rows, outputs, inputs, W4), "sm_90", 132):
            assert plan.sharers == shared_by(plan)


def test_a_join_costs_more_the_more_rows_and_blocks_it_brings_together():
    whole, *shared = sorted(
        (plan for plan in candidates(Problem(64, 4096, 4096, W4), "sm_90", 132) if plan.tiles == 8),
        key=lambda plan: plan.sharers,
    )
    costs = [plan.join_cost for plan in shared]
    assert whole.join_cost == 0
    assert whole.sharers == 1
    assert costs == sorted(costs)
    assert costs[-1] > 1.5 * costs[0]
    rows = [replace(shared[0], problem=Problem(rows, 4096, 4096, W4)).join_cost for rows in (8, 16, 32, 64)]
    assert rows == sorted(rows)
    assert rows[-1] > 1.5 * rows[0]


def test_many_rows_are_shared_by_fewer_blocks():
    few, many = (best(Problem(rows, 4096, 4096, W4), "sm_90", 132) for rows in (16, 64))
    assert many.slots < few.slots


def test_large_gpus_have_room_for_the_longest_pipelines():
    for architecture in ("sm_90", "sm_100", "sm_103", "sm_110"):
        assert shared_limit(architecture) == 227 << 10
    assert shared_limit("sm_120") == 99 << 10
