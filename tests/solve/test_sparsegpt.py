"""SparseGPT and the refit of kept weights, against algorithms written without any of our machinery, in float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from llmcompress.solve.damping import damped, inverse_factor
from llmcompress.solve.masked import refitted
from llmcompress.solve.prune import Pattern, pruned_mask
from llmcompress.solve.sparsegpt import MaskChoice, sparse_weights

ROWS, WIDTH = 24, 160


@pytest.fixture(scope="module")
def problem():
    """A weight, and the mean Gram matrix of correlated inputs with a few large channels."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(WIDTH, WIDTH, generator=generator) * 0.1 + torch.eye(WIDTH)
    x = torch.randn(2000, WIDTH, generator=generator) @ mix
    x[:, ::40] *= 8
    return torch.randn(ROWS, WIDTH, generator=generator), x.T @ x / len(x)


def loss(weight, target, hessian):
    delta = (weight - target).double()
    return float(((delta @ hessian.double()) * delta).sum())


def reference(weight, hessian, percdamp, choose):
    """Optimal brain surgery column by column with an explicit inverse (SparseGPT, algorithm 1), in float64.

    choose(j, w, diagonal): mask of dropped weights [out, some] of columns j ..., or None where it is decided already.
    """
    w = weight.double().numpy().copy()
    h = hessian.double().numpy()
    inverse = np.linalg.inv(h + percdamp * np.diag(h).mean() * np.eye(len(h)))
    dropped = np.zeros(w.shape, bool)
    upper = np.linalg.cholesky(inverse).T
    for j in range(len(h)):
        found = choose(j, w, np.diag(upper))
        if found is not None:
            dropped[:, j : j + found.shape[1]] = found
        error = np.where(dropped[:, j], w[:, j], 0.0)
        # what is left of the inverse after the columns before j: by their elimination one after the other
        w[:, j:] -= np.outer(error / inverse[j, j], inverse[j, j:])
        inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    w[dropped] = 0
    return w, dropped


@pytest.mark.parametrize("pattern", [Pattern(2, 4), Pattern(4, 8), Pattern(3, 5), Pattern(1, 32)], ids=str)
def test_patterns_are_those_of_the_published_algorithm(problem, pattern):
    weight, hessian = problem
    choice = MaskChoice(0.5, pattern)
    order = choice.order(hessian.diagonal())
    assert order.tolist() == list(range(WIDTH))
    factor = inverse_factor(hessian, 0.01)
    found = sparse_weights(weight, factor, order, choice.mask(factor.pivots, ROWS))

    def choose(j, w, diagonal):
        if j % pattern.of:
            return None
        score = (w[:, j : j + pattern.of] / diagonal[j : j + pattern.of]) ** 2
        rank = score.argsort(axis=1, kind="stable").argsort(axis=1)
        return rank < pattern.of - pattern.kept

    expected, dropped = reference(weight, hessian, 0.01, choose)
    assert (found.numpy() == 0).sum() == dropped.sum()
    assert ((found.numpy() == 0) == dropped).mean() > 0.999  # a tie to the last bit may fall either way
    agree = ((found.numpy() == 0) == dropped).all(axis=1)
    assert agree.sum() > ROWS // 2
    np.testing.assert_allclose(found.numpy()[agree], expected[agree], atol=2e-4)


@pytest.mark.parametrize("size", [16, 48, 80, 112, 128, 144, 160])
def test_a_share_is_chosen_of_columns_that_make_up_for_all_before(problem, size):
    """Also where a block of chosen columns lies across two blocks of updates."""
    weight, hessian = problem
    choice = MaskChoice(0.5, None, size)
    order = choice.order(hessian.diagonal(), by_energy=False)
    factor = inverse_factor(hessian, 0.01)
    found = sparse_weights(weight, factor, order, choice.mask(factor.pivots, ROWS))

    def choose(j, w, diagonal):
        if j % size:
            return None
        score = (w[:, j : j + size] / diagonal[j : j + size]) ** 2
        return score <= np.partition(score, round(0.5 * score.size) - 1, axis=None)[round(0.5 * score.size) - 1]

    _, dropped = reference(weight, hessian, 0.01, choose)
    assert ((found.numpy() == 0) == dropped).mean() > 0.999  # a tie to the last bit may fall either way


def test_shares_are_exact_in_every_block_and_the_sweep_beats_wanda(problem):
    weight, hessian = problem
    choice = MaskChoice(0.5, None, 32)
    order = choice.order(hessian.diagonal())
    factor = inverse_factor(hessian[order][:, order], 0.01)
    found = sparse_weights(weight, factor, order, choice.mask(factor.pivots, ROWS))
    gone = (found == 0)[:, order].view(ROWS, -1, 32)
    assert gone.sum(dim=(0, 2)).unique().tolist() == [ROWS * 16]
    score = weight.abs() * hessian.diagonal().sqrt()
    wanda = weight * ~pruned_mask(score, 0.5, None, False)
    assert loss(found, weight, hessian) < 0.7 * loss(wanda, weight, hessian)


def test_a_refit_reaches_the_exact_least_squares_and_never_goes_up(problem):
    weight, hessian = problem
    hessian = damped(hessian, 0.01)
    keep = ~pruned_mask(weight.abs(), 0.5, None, False)
    exact = torch.zeros_like(weight, dtype=torch.float64)
    for row in range(ROWS):
        at = keep[row]
        inner, right = hessian.double()[at][:, at], hessian.double()[at] @ weight[row].double()
        exact[row, at] = torch.linalg.solve(inner, right)
    losses = [loss(weight * keep, weight, hessian)]
    for steps in (1, 3, 10, 100):
        found = refitted(weight, weight, keep, hessian, steps)
        assert bool((found[~keep] == 0).all())
        losses.append(loss(found, weight, hessian))
    assert all(later <= before * (1 + 1e-6) for before, later in pairwise(losses))
    least = loss(exact, weight, hessian)
    assert losses[-1] == pytest.approx(least, rel=1e-4)
    assert losses[0] > 1.5 * least


@pytest.mark.parametrize("steps", [1, 10, 25])
def test_a_refit_raises_the_error_of_no_row_where_few_digits_do_not_suffice(steps):
    generator = torch.Generator().manual_seed(2)
    base = torch.randn(64, 64, generator=generator, dtype=torch.float64)
    scales = torch.logspace(-4, 3, 64, dtype=torch.float64)
    hessian = (base * scales).T @ (base * scales)  # far worse conditioned than anything damped
    weight = torch.randn(40, 64, generator=generator)
    keep = torch.rand(40, 64, generator=generator) < 0.5
    found = refitted(weight, weight, keep, hessian.float(), steps)

    def errors(values):
        missing = values.double() - weight.double()
        return ((missing @ hessian) * missing).sum(dim=1)

    assert bool(torch.isfinite(found).all())
    assert bool((found[~keep] == 0).all())
    assert bool((errors(found) <= errors(weight * keep) * (1 + 1e-5)).all())
