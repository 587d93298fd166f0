"""Inputs that go and what is left of a matrix, against least squares on the inputs themselves, in float64."""

from itertools import combinations

import numpy as np
import pytest
import torch

from llmcompress.errors import RunError
from llmcompress.solve.narrowing import input_energy, least_missed, narrowing_loss, refitted, strongest


def problem(rows=12, columns=24, tokens=600, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    x = torch.randn(tokens, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    return weight, x, x.T @ x / tokens


def error(weight, x, kept, after):
    wanted = x.double() @ weight.double().T
    got = x[:, kept].double() @ after.double().T
    return float((wanted - got).square().sum() / wanted.square().sum())


def test_refitting_is_least_squares():
    weight, x, hessian = problem()
    kept = torch.tensor([0, 2, 3, 5, 8, 13, 20, 23])
    wanted = np.linalg.lstsq(x[:, kept].double().numpy(), (x @ weight.T).double().numpy(), rcond=None)[0].T
    np.testing.assert_allclose(refitted(weight, hessian, kept, 1e-9).numpy(), wanted, rtol=1e-2, atol=1e-3)


def test_damping_draws_towards_what_the_weights_were():
    weight, _, hessian = problem()
    kept = torch.arange(16)
    found = [refitted(weight, hessian, kept, damping) for damping in (0.01, 1, 99)]
    distances = [float((after - weight[:, kept]).norm()) for after in found]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.1 * distances[0]


def test_the_loss_is_that_of_the_outputs():
    weight, x, hessian = problem()
    kept = torch.arange(0, 24, 2)
    for after in (weight[:, kept], refitted(weight, hessian, kept, 0.01)):
        np.testing.assert_allclose(
            narrowing_loss(weight, hessian, kept, after), error(weight, x, kept, after), rtol=1e-3
        )


def test_the_strongest_add_most_and_of_equal_ones_the_first_stay():
    weight, x, hessian = problem()
    added = torch.stack([(x[:, [c]] @ weight[:, [c]].T).square().sum(1).mean() for c in range(24)])
    torch.testing.assert_close(input_energy(weight, hessian), added, rtol=1e-4, atol=1e-4)
    assert strongest(torch.ones(2, 6), torch.eye(6), 4).tolist() == [0, 1, 2, 3]


def test_of_two_that_are_alike_one_stays():
    weight, x, _ = problem(columns=8)
    x[:, 5] = x[:, 2] * 1.01
    weight[:, [2, 5]] = 10 * weight[:, [2, 5]].abs()  # the strongest two, and each can stand for the other
    hessian = x.T @ x / len(x)
    kept = least_missed(weight, hessian, 7, 1e-8)
    assert len({2, 5} & set(kept.tolist())) == 1


@pytest.mark.parametrize("count", [3, 5])
def test_one_by_one_is_near_the_best_of_all_choices(count):
    weight, x, hessian = problem(columns=8, seed=3)
    kept = least_missed(weight, hessian, count, 1e-8)
    assert kept.tolist() == sorted(set(kept.tolist()))
    losses = [
        error(weight, x, list(some), refitted(weight, hessian, torch.tensor(some), 1e-8))
        for some in combinations(range(8), count)
    ]
    mine = error(weight, x, kept, refitted(weight, hessian, kept, 1e-8))
    assert mine <= sorted(losses)[len(losses) // 10]


def test_the_cost_that_goes_by_is_that_of_refitting():
    """With one input less the loss is ||W[:, c]||^2 / [H^-1]_cc, so the choice is the best of all."""
    weight, x, hessian = problem(columns=10)
    losses = []
    for gone in range(10):
        kept = torch.tensor([c for c in range(10) if c != gone])
        losses.append(error(weight, x, kept, refitted(weight, hessian, kept, 1e-9)))
    assert int(np.argmin(losses)) not in least_missed(weight, hessian, 9, 1e-9).tolist()


def test_inputs_that_are_no_numbers_end_in_one_line():
    with pytest.raises(RunError, match="not positive definite"):
        refitted(torch.ones(2, 3), torch.full((3, 3), float("nan")), torch.tensor([0, 1]), 0.01)
