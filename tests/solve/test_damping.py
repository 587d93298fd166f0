"""Factors of matrices that are worked on in parts: LAPACK's and float64's, on any number of threads."""

import pytest
import torch

from llmcompress.solve import damping
from llmcompress.solve.damping import backwards, cholesky_, damped, inverse_factor, permuted
from llmcompress.workers import SERIAL, Workers


@pytest.fixture
def in_parts(monkeypatch):
    monkeypatch.setattr(damping, "WHOLE", 160)
    monkeypatch.setattr(damping, "_SOLVED", 96)


def gram(size, seed=0):
    x = torch.randn(2 * size, size, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-1, 1, size)
    return x.T @ x / len(x)


@pytest.mark.parametrize("size", [96, 161, 256, 300, 513])
@pytest.mark.usefixtures("in_parts")
def test_parts_make_the_factor_of_the_whole(size):
    hessian = gram(size)
    factor = inverse_factor(hessian, 0.01)
    upper = ((factor.ahead + torch.eye(size)) * factor.pivots[:, None]).double()
    assert torch.equal(upper, upper.triu())
    product = upper @ damped(hessian.double(), 0.01) @ upper.T
    torch.testing.assert_close(product, torch.eye(size).double(), rtol=0, atol=1e-4)
    lower = cholesky_(damped(hessian.double(), 0.01), SERIAL)
    torch.testing.assert_close(lower, torch.linalg.cholesky(damped(hessian.double(), 0.01)), rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("in_parts")
def test_an_order_of_columns_makes_the_factor_of_the_matrix_in_that_order():
    hessian = gram(300)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    ordered, given = (
        inverse_factor(permuted(hessian, order), 0.01, 0.02),
        inverse_factor(hessian, 0.01, 0.02, order=order),
    )
    assert torch.equal(given.ahead, ordered.ahead)
    assert torch.equal(given.pivots, ordered.pivots)
    assert torch.equal(backwards(hessian, order, torch.float64).flip(0, 1), permuted(hessian, order).double())


@pytest.mark.usefixtures("in_parts")
def test_threads_change_no_bit():
    with Workers().with_threads(3) as workers:
        shared = inverse_factor(gram(400), 0.01, 0.02, workers)
    with Workers().with_threads(1):
        alone = inverse_factor(gram(400), 0.01, 0.02, SERIAL)
    assert torch.equal(shared.ahead, alone.ahead)
    assert torch.equal(shared.pivots, alone.pivots)


@pytest.mark.parametrize("place", [3, 100, 250, 300])
@pytest.mark.usefixtures("in_parts")
def test_no_part_hides_that_a_matrix_has_no_factor(place):
    matrix = gram(320).double()
    matrix[place, place] = -1.0
    assert cholesky_(matrix.clone(), SERIAL) is None
    assert cholesky_(matrix) is None
