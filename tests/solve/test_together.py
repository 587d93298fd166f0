"""GPTQ by units of columns: less output error than rounding them alone, and steps that never cost more."""

import pytest
import torch

from llmcompress.grids.encoders import encode
from llmcompress.grids.fitting import fit
from llmcompress.grids.lattice import SPECS, UNIT
from llmcompress.solve.damping import damped, inverse_factor
from llmcompress.solve.gptq import gptq_codes
from llmcompress.solve.prepared import Prepared, column_order
from llmcompress.solve.refine import row_loss
from llmcompress.workers import SERIAL

SIZE = 512


@pytest.fixture(scope="module")
def problem():
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(48, SIZE, generator=draw)
    mix = torch.eye(SIZE) + 0.7 * torch.randn(SIZE, SIZE, generator=draw) / SIZE**0.5
    x = torch.randn(4 * SIZE, SIZE, generator=draw) * torch.rand(SIZE, generator=draw).add(0.3) @ mix
    return weight, x.T @ x / len(x)


def solved(problem, name, block_size=128):
    weight, hessian = problem
    order = column_order(hessian, True, UNIT)
    factor = inverse_factor(hessian[order][:, order], 0.01)
    ready = Prepared(damped(hessian, 0.01), order, factor)
    grid = fit(weight, SPECS[name], importance=ready.cost)
    return ready, gptq_codes(weight, grid, factor, order, block_size)


@pytest.mark.parametrize("name", sorted(SPECS))
def test_columns_make_up_for_those_before(name, problem):
    weight, hessian = problem
    ready, coded = solved(problem, name)
    alone = encode(weight, SPECS[name], "best", SERIAL, hessian.diagonal())
    assert coded.grid.numbers(coded.codes)
    assert row_loss(weight, coded, hessian).sum() < 0.75 * row_loss(weight, alone, hessian).sum()
    better, gradient = ready.refiner.descend_codes(coded, ready.refiner.gradient(weight, coded))
    exact = ready.refiner.gradient(weight, better)
    torch.testing.assert_close(gradient, exact, rtol=1e-3, atol=1e-4 * float(exact.abs().max()))
    assert better.grid.numbers(better.codes)
    before, after = (row_loss(weight, item, ready.refiner.hessian) for item in (coded, better))
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < 0.97 * before.sum()


def test_how_many_columns_are_updated_at_once_changes_speed_only(problem):
    first, second = (solved(problem, "IQ2_S", size)[1] for size in (8, 512))
    assert (first.codes != second.codes).float().mean() < 0.01  # sums in another order


def test_units_stay_together_in_order_of_their_energy(problem):
    hessian = problem[1]
    order = column_order(hessian, True, UNIT).view(-1, UNIT)
    assert torch.equal(order - order[:, :1], torch.arange(UNIT).expand_as(order))
    assert (order[:, 0] % UNIT == 0).all()
    energy = hessian.diagonal()[order].sum(1)
    assert (energy.diff() <= 0).all()
    assert torch.equal(column_order(hessian, False, UNIT), torch.arange(SIZE))
