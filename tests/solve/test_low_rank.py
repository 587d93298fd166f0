"""The repair of low rank, against the singular values of D L in float64, which bound what any can reach."""

import numpy as np
import pytest
import torch

from llmcompress.solve.low_rank import low_rank, output_energy


def problem(rows, columns, tokens=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(rows, columns, generator=generator)
    x = torch.randn(tokens, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    return delta, x.T @ x / tokens


def left(delta, hessian, rank):
    """The least error that a repair of that rank can leave: the squares of the other singular values of D H^(1/2)."""
    values, vectors = np.linalg.eigh(hessian.double().numpy())
    root = vectors * np.sqrt(values.clip(0))
    return float((np.linalg.svd(delta.double().numpy() @ root, compute_uv=False)[rank:] ** 2).sum())


@pytest.mark.parametrize(("rows", "columns"), [(48, 64), (64, 48), (40, 40)])
@pytest.mark.parametrize("rank", [1, 8, 31])
def test_no_repair_of_that_rank_leaves_less(rows, columns, rank):
    delta, hessian = problem(rows, columns)
    found = low_rank(delta, hessian, rank)
    assert (found.b.shape, found.a.shape) == ((rows, rank), (rank, columns))
    np.testing.assert_allclose(output_energy(delta - found.product(), hessian), left(delta, hessian, rank), rtol=1e-3)


def test_inputs_that_never_were_need_no_damping():
    delta, hessian = problem(32, 48, tokens=20)  # of rank 20
    found = low_rank(delta, hessian, 12)
    np.testing.assert_allclose(output_energy(delta - found.product(), hessian), left(delta, hessian, 12), rtol=1e-3)


def test_without_inputs_it_is_the_truncated_svd():
    delta, _ = problem(48, 30)
    u, s, v = torch.linalg.svd(delta.double(), full_matrices=False)
    torch.testing.assert_close(
        low_rank(delta, None, 5).product().double(), (u[:, :5] * s[:5]) @ v[:5], rtol=1e-3, atol=1e-4
    )


def test_weighing_inputs_beats_the_plain_svd_in_outputs_and_loses_in_weights():
    delta, hessian = problem(48, 64)
    weighed, plain = low_rank(delta, hessian, 8).product(), low_rank(delta, None, 8).product()
    assert output_energy(delta - weighed, hessian) < 0.8 * output_energy(delta - plain, hessian)
    assert output_energy(delta - weighed, None) > output_energy(delta - plain, None)
