"""GPTQ and descent on the block grids of GGUF, against the plain algorithm in float64 and brute force."""

import pytest
import torch

from llmcompress.grids.blocks import BLOCK_TYPES
from llmcompress.grids.encoders import encode
from llmcompress.solve.damping import damped, inverse_factor
from llmcompress.solve.gptq import gptq_codes
from llmcompress.solve.refine import Refiner, row_loss
from llmcompress.workers import SERIAL

TYPES = list(BLOCK_TYPES)
ROWS, WIDTH = 8, 512


@pytest.fixture(scope="module")
def weight():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)) * 0.1


@pytest.fixture(scope="module")
def hessian():
    """A damped mean Gram matrix of correlated inputs with outlier channels."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2000, WIDTH, generator=g) @ (torch.randn(WIDTH, WIDTH, generator=g) * 0.05 + torch.eye(WIDTH))
    x[:, :5] *= 6
    return damped(x.T @ x / 2000, 0.01)


def swept(weight, hessian, name, order=None):
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True) if order is None else order
    grid = encode(weight, BLOCK_TYPES[name], "fast", SERIAL, hessian.diagonal().contiguous()).grid
    return gptq_codes(weight, grid, inverse_factor(hessian[order][:, order], 0.01), order)


def exact_loss(weight, coded, hessian):
    """As `row_loss`, in float64."""
    delta = coded.decode().double() - weight.double()
    return ((delta @ hessian.double()) * delta).sum(dim=1)


@pytest.mark.parametrize("name", ["Q4_K", "Q3_K", "IQ4_XS", "Q5_1", "Q8_0"])
def test_gptq_matches_the_plain_algorithm_in_float64(weight, hessian, name):
    coded = swept(weight, hessian, name, torch.arange(WIDTH))
    grid, index = coded.grid, coded.grid.group_index
    levels = grid.levels(torch.arange(grid.spec.levels, dtype=torch.uint8)).double()
    upper = torch.linalg.cholesky(torch.linalg.inv(damped(hessian.double(), 0.01)), upper=True)
    work = weight.double().clone()
    for j in range(WIDTH):
        scale = grid.scale[:, index[j]].double()
        offset = 0.0 if grid.offset is None else grid.offset[:, index[j]].double()
        value = torch.stack([scale * level + offset for level in levels])  # [levels, out]
        distance = (value - work[:, j]).abs()
        chosen = distance[coded.codes[:, j].long(), torch.arange(ROWS)]
        assert (chosen <= distance[grid.spec.lowest :].amin(0) + 1e-4 * scale.abs() + 1e-6).all()
        quantised = value[coded.codes[:, j].long(), torch.arange(ROWS)]
        work[:, j:] -= ((work[:, j] - quantised) / upper[j, j])[:, None] * upper[j, j:]


@pytest.mark.parametrize("name", TYPES)
def test_feedback_loses_less_than_rounding_and_descent_less_still(weight, hessian, name):
    rounded = encode(weight, BLOCK_TYPES[name], "fast", SERIAL, hessian.diagonal().contiguous())
    coded = swept(weight, hessian, name)
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    refined = Refiner(hessian, order).refine(weight, coded, torch.bfloat16, 2)
    losses = [row_loss(weight, item, hessian).sum() for item in (rounded, coded, refined)]
    assert losses[1] < 0.85 * losses[0]
    assert losses[2] < 0.95 * losses[1]


@pytest.mark.parametrize("name", TYPES)
def test_better_scales_never_raise_any_rows_loss(weight, hessian, name):
    coded = swept(weight, hessian, name)
    better = coded.grid.refit(coded.codes, hessian, (weight - coded.decode()) @ hessian, torch.float16)
    before, after = row_loss(weight, coded, hessian), row_loss(weight, better, hessian)
    assert (after <= before * (1 + 1e-4)).all()
    assert after.sum() < before.sum() or name == "Q5_K"
    grid = better.grid
    assert torch.equal(grid.d, grid.d.half().float())
    for whole in (grid.multiples, grid.minima):
        if whole is not None:
            low, high = grid.spec.multiples
            assert torch.equal(whole, whole.round())
            assert low <= whole.min()
            assert whole.max() <= high


@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q6_K", "IQ4_XS"])
def test_no_single_step_of_the_last_block_is_left(weight, hessian, name):
    """Brute force: after descent to the end, no multiple or minimum of the last block is better one up or down."""
    coded = swept(weight, hessian, name)
    for _ in range(20):
        coded = coded.grid.refit(coded.codes, hessian, (weight - coded.decode()) @ hessian, torch.float16)
    grid, best = coded.grid, exact_loss(weight, coded, hessian)
    low, high = grid.spec.multiples
    for field in ("multiples", "minima"):
        whole = getattr(grid, field)
        if whole is None:
            continue
        for group in range(whole.shape[1] - grid.spec.groups_per_block, whole.shape[1]):
            for step in (-1, 1):
                moved = whole.clone()
                moved[:, group] = (moved[:, group] + step).clamp(low, high)
                changed = {**grid.parts, field: moved}
                other = type(coded)(coded.codes, type(grid)(grid.spec, **changed))
                assert (exact_loss(weight, other, hessian) >= best * (1 - 1e-3)).all()


def test_dead_rows_and_zero_scales_stay_finite(hessian):
    zeros = torch.zeros(ROWS, WIDTH)
    for name in TYPES:
        coded = swept(zeros, hessian, name)
        better = Refiner(hessian, torch.arange(WIDTH)).refine(zeros, coded, torch.bfloat16, 1)
        assert torch.equal(better.decode(), zeros), name
