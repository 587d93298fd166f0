"""Floats of 8 bits against a table of all their values, and the bytes of another encoder."""

import numpy as np
import pytest
import torch

from llmcompress.errors import RecipeError
from llmcompress.grids.coded import Coded
from llmcompress.grids.float8 import Float8Spec, fit, rounded_
from llmcompress.grids.grid_type import restored, spec_named
from llmcompress.solve.damping import inverse_factor
from llmcompress.solve.gptq import gptq_codes
from llmcompress.solve.refine import Refiner, row_loss

SPEC = Float8Spec()
# sign, 4 bits of exponent with a bias of 7, 3 of mantissa; code 0x7F is no number
POSITIVE = np.array(
    [(m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)]
)
POSITIVE = POSITIVE[:-1]
VALUES = np.concatenate([-POSITIVE[:0:-1], POSITIVE])


def nearest(values):
    """The nearest of all 253 values by exhaustive search, of two the one with an even mantissa."""
    distance = np.abs(values[:, None].astype(np.float64) - VALUES)
    least = distance.min(1, keepdims=True)
    even = (np.abs(np.arange(VALUES.size) - (VALUES.size // 2)) % 2) == 0
    return VALUES[np.where(distance == least, np.where(even, 0, 1), 2).argmin(1)]


def test_there_are_253_values():
    assert VALUES.size == np.unique(VALUES).size == 253
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert set(codes[codes.isfinite()].tolist()) == set(VALUES.tolist())


def test_rounding_finds_the_nearest_value_ties_to_even():
    between = (VALUES[1:] + VALUES[:-1]) / 2
    generator = np.random.default_rng(0)
    every = np.concatenate(
        [VALUES, between, np.nextafter(between.astype(np.float32), 1e9), np.nextafter(between.astype(np.float32), -1e9)]
        + [generator.normal(0, 10.0**power, 2000) for power in range(-5, 4)]
    ).astype(np.float32)
    found = rounded_(torch.from_numpy(every.copy())).numpy()
    assert np.array_equal(found, nearest(every))
    assert not np.signbit(found[found == 0]).any()


def test_scales_and_bytes_are_those_of_compressed_tensors():
    weight = torch.tensor([[-1, 0.5, 0.25, 2, 0.1, -0.2, 0.3, -0.4], [0, 3, 6, 1.5, -7.5, 7.5, 1, -1]])
    grid = fit(weight, SPEC, clip="minmax", scale_dtype=torch.float32)
    assert torch.allclose(grid.scale[:, 0], torch.tensor([0.0044642859, 0.016741071]), rtol=1e-7)
    assert grid.encode(weight).tolist() == [
        [246, 110, 102, 126, 91, 227, 104, 235],
        [0, 115, 123, 107, 254, 126, 103, 231],
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_search_loses_no_more_than_the_whole_range_and_scales_are_stored_exactly(dtype):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 96, generator=generator) * 0.03
    weight[3] = 0
    importance = torch.rand(96, generator=generator)
    whole, searched = (
        fit(weight, SPEC, clip=clip, importance=importance, scale_dtype=dtype) for clip in ("minmax", "search")
    )
    losses = [
        ((grid.decode(grid.encode(weight)) - weight).double().square() * importance).sum(1)
        for grid in (whole, searched)
    ]
    assert (losses[1] <= losses[0] * (1 + 1e-6)).all()
    assert losses[1].sum() < 0.97 * losses[0].sum()
    for grid in (whole, searched):
        assert torch.equal(grid.scale.to(dtype).float(), grid.scale)
        assert not grid.encode(weight)[3].any()


def test_codes_are_stored_and_found_again():
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(2))
    grid = fit(weight, SPEC)
    coded = Coded(grid.encode(weight), grid, torch.tensor([0.5]))
    again = restored(spec_named(SPEC.name), coded.stored())
    assert torch.equal(again.decode(), coded.decode())
    assert again.input_scale.item() == 0.5
    assert torch.equal(again.rows(slice(2, 5)).decode(), coded.decode()[2:5])
    assert torch.equal(grid.codes(grid.levels(coded.codes)), coded.codes)


def test_error_feedback_and_descent_lower_the_loss_on_floats():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(400, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    hessian, weight = x.T @ x / 400, torch.randn(24, 64, generator=generator) * 0.1
    grid = fit(weight, SPEC)
    order = torch.argsort(hessian.diagonal(), descending=True)
    plain = Coded(grid.encode(weight), grid)
    swept = gptq_codes(weight, grid, inverse_factor(hessian[order][:, order], 0.01), order)
    refined = Refiner(hessian, order).refine(weight, swept, torch.float16, 1)
    before, after, last = (float(row_loss(weight, coded, hessian).sum()) for coded in (plain, swept, refined))
    assert after < 0.8 * before
    assert last < after
    for coded in (swept, refined):  # every level is one of the 253
        assert np.isin(coded.grid.levels(coded.codes).numpy(), VALUES).all()


@pytest.mark.parametrize("arguments", [(4, -1, True), (8, 128, True), (8, -1, False)])
def test_there_are_no_other_grids_of_floats(arguments):
    with pytest.raises(RecipeError, match="fp8"):
        Float8Spec(*arguments)
