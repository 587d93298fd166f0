"""The solvers against brute force and float64: what they minimise, what changes speed only, the edges."""

import itertools

import pytest
import torch

from llmcompress.errors import RunError
from llmcompress.grids.coded import Coded
from llmcompress.grids.integer import IntegerSpec, fit
from llmcompress.solve.damping import damped, inverse_factor
from llmcompress.solve.gptq import gptq_codes
from llmcompress.solve.refine import Refiner, row_loss


def problem(rows=16, width=64, tokens=400, seed=0):
    """Weights and a mean Gram matrix of correlated inputs with outlier channels."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, width, generator=g) * 0.1
    mixing = torch.randn(width, width, generator=g) * 0.3 + torch.eye(width)
    x = torch.randn(tokens, width, generator=g) @ mixing
    x[:, :2] *= 10
    return w, x.T @ x / tokens


def by_energy(hessian):
    return torch.argsort(hessian.diagonal(), descending=True, stable=True)


def gptq(w, hessian, spec, order=None, block=128, **options):
    order = by_energy(hessian) if order is None else order
    grid = fit(w, spec, importance=hessian.diagonal(), **options)
    return gptq_codes(w, grid, inverse_factor(hessian[order][:, order], 0.01), order, block)


def descended(weight, coded, refiner):
    """The codes after one pass of descent."""
    return refiner.descend_codes(coded, refiner.gradient(weight, coded))[0]


def test_factor_is_that_of_the_inverse():
    _, hessian = problem()
    factor = inverse_factor(hessian, 0.01)
    upper = ((factor.ahead + torch.eye(64)) * factor.pivots[:, None]).double()
    inverse = torch.linalg.inv(damped(hessian.double(), 0.01))
    assert torch.allclose(upper.T @ upper, inverse, rtol=1e-4, atol=1e-6 * inverse.abs().max())
    assert torch.equal(upper, upper.triu())


def test_gptq_matches_the_plain_algorithm_in_float64():
    w, hessian = problem(rows=5, width=24)
    spec = IntegerSpec(3, 8)
    coded = gptq(w, hessian, spec, order=torch.arange(24))
    grid = coded.grid
    inverse = torch.linalg.inv(damped(hessian.double(), 0.01))
    upper = torch.linalg.cholesky(inverse, upper=True)
    work = w.double().clone()
    for j in range(24):
        scale, zero = grid.scale[:, j // 8].double(), grid.zero[:, j // 8].double()
        code = (work[:, j] / scale + zero).round().clamp(0, 7)
        assert torch.equal(code, coded.codes[:, j].double())
        error = (work[:, j] - (code - zero) * scale) / upper[j, j]
        work[:, j:] -= error[:, None] * upper[j, j:]


@pytest.mark.parametrize("block", [1, 7, 32, 64, 200])
def test_block_size_only_changes_speed(block):
    w, hessian = problem()
    reference = gptq(w, hessian, IntegerSpec(4, 16))
    other = gptq(w, hessian, IntegerSpec(4, 16), block=block)
    differing = (reference.codes != other.codes).any(dim=1)
    assert differing.sum() <= 1  # the order of sums may tip a tie, and that the rest of its row


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_feedback_beats_rounding_on_what_it_minimises(bits):
    w, hessian = problem()
    coded = gptq(w, hessian, IntegerSpec(bits, 16))
    plain = Coded(coded.grid.encode(w), coded.grid)
    assert row_loss(w, coded, hessian).sum() < row_loss(w, plain, hessian).sum()
    # no column is off by more than half a step once the others have made up for theirs: Babai's nearest plane
    order, target = by_energy(hessian), damped(hessian.double(), 0.01)
    upper = torch.linalg.cholesky(torch.linalg.inv(target[order][:, order]), upper=True)
    half = coded.grid.scale.repeat_interleave(16, dim=1)[:, order].double() / 2
    assert row_loss(w, coded, target.float()).sum() <= (half / upper.diagonal()).square().sum()


def test_energy_order_beats_stored_order():
    w, hessian = problem(seed=3)
    w, hessian = w.flip(1), hessian.flip(0, 1)  # the outlier channels come last
    static = row_loss(w, gptq(w, hessian, IntegerSpec(3, 16)), hessian).sum()
    stored = row_loss(w, gptq(w, hessian, IntegerSpec(3, 16), order=torch.arange(64)), hessian).sum()
    assert static < stored


@pytest.mark.parametrize(
    "spec", [IntegerSpec(3, 16), IntegerSpec(4, -1), IntegerSpec(2, 32, False)], ids=lambda s: s.name
)
def test_refinement_never_raises_any_rows_loss(spec):
    w, hessian = problem()
    target = damped(hessian, 0.01)
    coded = gptq(w, hessian, spec)
    start = row_loss(w, coded, target)
    for _ in range(3):
        before = row_loss(w, coded, target)
        coded = coded.grid.refit(coded.codes, target, (w - coded.decode()) @ target, torch.float16)
        between = row_loss(w, coded, target)
        assert (between <= before * (1 + 1e-4) + 1e-9).all()
        coded = descended(w, coded, Refiner(target, by_energy(hessian)))
        assert (row_loss(w, coded, target) <= between * (1 + 1e-4) + 1e-9).all()
    assert row_loss(w, coded, target).sum() < 0.9 * start.sum()  # 0.70 to 0.89 on eight seeds: it moves at all


def test_the_gradient_follows_every_move():
    """After a descent it is H (w - q) of the new codes, in float64, before the moved columns and after them."""
    w, hessian = problem()
    order = by_energy(hessian)
    refiner = Refiner(damped(hessian, 0.01), order)
    coded = gptq(w, hessian, IntegerSpec(3, 16))
    moved, gradient = refiner.descend_codes(coded, refiner.gradient(w, coded), block_size=24)
    assert (moved.codes != coded.codes).any()
    exact = (refiner.hessian.double() @ (w - moved.decode()).double().T)[order]
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-3, atol=1e-5 * float(exact.abs().max()))


def test_descent_ends_where_no_single_code_can_be_bettered():
    w, hessian = problem(rows=4, width=16)
    target = damped(hessian, 0.01)
    coded = gptq(w, hessian, IntegerSpec(3, 8))
    for _ in range(20):
        coded = descended(w, coded, Refiner(target, torch.arange(16)))
    base = row_loss(w, coded, target)
    for j, code in itertools.product(range(16), range(8)):
        codes = coded.codes.clone()
        codes[:, j] = code
        assert (row_loss(w, Coded(codes, coded.grid), target) >= base * (1 - 1e-4) - 1e-7).all()


@pytest.mark.parametrize("seed", range(3))
def test_small_problem_reaches_the_best_of_all_codes(seed):
    w, hessian = problem(rows=3, width=6, tokens=50, seed=seed)
    target = damped(hessian, 0.01)
    grid = fit(w, IntegerSpec(2, 6), importance=hessian.diagonal())
    coded = gptq_codes(w, grid, inverse_factor(hessian, 0.01), torch.arange(6))
    coded = descended(w, coded, Refiner(target, torch.arange(6)))
    every = torch.cartesian_prod(*[torch.arange(4)] * 6).to(torch.uint8)
    for row in range(3):
        one = grid.rows(slice(row, row + 1))
        best = min(float(row_loss(w[row : row + 1], Coded(codes[None], one), target)) for codes in every)
        assert float(row_loss(w, coded, target)[row]) == pytest.approx(best, rel=1e-5)


def test_dead_inputs_are_rounded_not_zeroed():
    w, hessian = problem()
    hessian[5, :] = hessian[:, 5] = 0
    factor = inverse_factor(hessian, 0.01)
    assert factor.dead == 1
    coded = gptq(w, hessian, IntegerSpec(4, 16))
    assert torch.equal(coded.codes[:, 5], coded.grid.encode(w)[:, 5])


def test_damping_is_raised_only_where_needed_and_never_gives_up_in_silence():
    _, hessian = problem()
    assert inverse_factor(hessian, 0.01).percdamp == 0.01
    indefinite = torch.eye(64)
    indefinite[0, 1] = indefinite[1, 0] = 1.05  # smallest eigenvalue -0.05
    assert inverse_factor(indefinite, 0.01).percdamp == pytest.approx(0.1)
    with pytest.raises(RunError, match="not positive definite"):
        inverse_factor(hessian - 1e4 * torch.ones_like(hessian), 0.01)


def test_inputs_are_left_as_they_were():
    w, hessian = problem()
    kept = w.clone(), hessian.clone()
    coded = gptq(w, hessian, IntegerSpec(3, 16))
    coded.grid.refit(coded.codes, hessian, (w - coded.decode()) @ hessian, torch.float16)
    descended(w, coded, Refiner(hessian, by_energy(hessian)))
    assert torch.equal(w, kept[0])
    assert torch.equal(hessian, kept[1])
