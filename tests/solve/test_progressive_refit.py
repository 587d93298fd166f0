"""GPTQ and descent on progressive groups: below rounding in the Gram loss, within int8, both scales by brute force."""

from dataclasses import replace

import pytest
import torch

from llmcompress.grids.coded import Coded
from llmcompress.grids.progressive import ProgressiveSpec, fit
from llmcompress.methods.base import Statistics
from llmcompress.methods.gptq import Gptq
from llmcompress.methods.rtn import Rtn
from llmcompress.solve.damping import damped
from llmcompress.solve.refine import Refiner, row_loss
from llmcompress.solve.row_blocks import SERIAL_BLOCKS
from llmcompress.stats.gram import Gram
from llmcompress.workers import SERIAL

OPTIONS = {"type": "progressive", "group_size": 32}


def problem(rows=24, width=128, tokens=2000, seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=g) * 0.1
    weight[:, 9] *= 6
    x = torch.randn(tokens, width, generator=g) @ (torch.randn(width, width, generator=g) * 0.1 + torch.eye(width))
    x[:, :3] *= 10
    gram = Gram(width, SERIAL)
    gram.update(x)
    return weight, Statistics({"gram": gram})


@pytest.mark.parametrize("more", [{}, {"actorder": "none"}, {"actorder": "group"}, {"clip": "minmax"}], ids=str)
def test_gptq_beats_rounding_by_far_descent_helps_and_nothing_leaves_int8(more):
    weight, stats = problem()
    hessian = stats.gram.finish()

    def lost(method):
        coded = method.solve(weight, stats, torch.bfloat16, SERIAL_BLOCKS).coded
        assert int(coded.grid.whole(coded.codes).abs().max()) <= 127
        assert torch.equal(coded.grid.multiple, coded.grid.multiple.round().clamp(1, 16))
        assert torch.equal(coded.grid.row_scale, coded.grid.row_scale.half().float())
        return float(row_loss(weight, coded, hessian).sum())

    swept = lost(Gptq(**OPTIONS, **more, descent=0))
    rounded = lost(Rtn(**OPTIONS, **({"clip": "minmax"} if "clip" in more else {})))
    assert swept < 0.7 * rounded
    assert lost(Gptq(**OPTIONS, **more)) < swept


def test_no_round_of_descent_raises_the_loss_of_a_row():
    weight, stats = problem()
    hessian = damped(stats.gram.finish(), 0.01)
    grid = fit(weight, ProgressiveSpec(32), clip="minmax")
    before = Coded(grid.encode(weight), grid)
    after = Refiner(hessian, torch.arange(128)).refine(weight, before, torch.float16, 2)
    assert (row_loss(weight, after, hessian) <= row_loss(weight, before, hessian) * (1 + 1e-5)).all()


def test_the_scale_of_a_row_is_that_of_least_squares_and_no_multiple_can_be_moved_for_less():
    weight, stats = problem(rows=8, width=64)
    hessian = damped(stats.gram.finish(), 0.01)
    grid = fit(weight, ProgressiveSpec(32), clip="minmax")
    codes = grid.encode(weight)
    found = grid.refit(codes, hessian, (weight - grid.decode(codes)) @ hessian, torch.float16)
    loss = row_loss(weight, found, hessian)
    assert (loss < row_loss(weight, Coded(codes, grid), hessian)).all()
    whole = found.grid.whole(codes).double()
    precise = hessian.double()
    best = ((whole @ precise) * weight.double()).sum(1) / ((whole @ precise) * whole).sum(1)
    assert torch.allclose(found.grid.row_scale[:, 0].double(), best, rtol=2**-10)
    for group in range(2):
        for step in (-1, 1):
            multiple = found.grid.multiple.clone()
            multiple[:, group] += step
            moved = replace(found.grid, multiple=multiple)
            allowed = (multiple[:, group] >= 1) & (multiple[:, group] <= 16)
            allowed &= moved.whole(codes).abs().amax(1) <= 127
            worse = row_loss(weight, Coded(codes, moved), hessian) >= loss * (1 - 2e-3)  # s0 was rounded after
            assert worse[allowed].all()
