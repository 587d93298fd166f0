"""Rounded inputs against their definition, and fixed ranges against an exhaustive search."""

import numpy as np
import pytest
import torch

from llmcompress.grids.base import INPUT_SPECS
from llmcompress.grids.e2m1 import rounded_
from llmcompress.grids.inputs import InputGrid, divisor, foreseen, static_scale
from llmcompress.stats.absmax import AbsMax
from llmcompress.stats.magnitudes import Magnitudes
from llmcompress.stats.peaks import Peaks

X = torch.randn(3, 7, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 7)[:, None]


def test_integers_by_token_are_the_definition():
    x = X.double().numpy()
    scale = np.abs(x).max(-1, keepdims=True) / 127.5
    expected = np.clip(np.round(x / scale), -128, 127) * scale
    found = InputGrid(INPUT_SPECS["int8-token"]).rounded(X).numpy()
    extreme = np.abs(x) == np.abs(x).max(-1, keepdims=True)  # half a step from two codes, which float32 tells apart
    assert np.allclose(found[~extreme], expected[~extreme], rtol=1e-6, atol=0)
    assert (np.abs(found - x) <= scale * 0.5001).all()


def test_floats_by_token_are_the_cast_of_torch():
    scale = X.abs().amax(-1, keepdim=True) / 448
    expected = (X / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(InputGrid(INPUT_SPECS["fp8-token"]).rounded(X), expected)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BLOCKS = torch.randn(3, 7, 256, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 2, 7)[:, None]


def nearest_even(values):
    """Values to the nearest of E2M1, of two to the one of even index, by brute force in float64."""
    far = np.abs(np.abs(values)[..., None] - E2M1)
    ties = far <= far.min(-1, keepdims=True)
    even = np.where(ties & (np.arange(8) % 2 == 0), 0, np.where(ties, 1, 2)).argmin(-1)
    return np.sign(values) * E2M1[even]


def grouped(x, size):
    blocks = x.double().numpy().reshape(*x.shape[:-1], -1, size)
    return blocks, np.abs(blocks).max(-1, keepdims=True)


def test_groups_of_floats_are_the_cast_of_torch():
    scale = BLOCKS.view(3, 7, 2, 128).abs().amax(-1, keepdim=True) / 448
    expected = (BLOCKS.view(3, 7, 2, 128) / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(InputGrid(INPUT_SPECS["fp8-group"]).rounded(BLOCKS), expected.view(3, 7, 256))


def test_a_last_group_may_not_be_full():
    grid = InputGrid(INPUT_SPECS["fp8-group"])
    assert torch.equal(grid.rounded(BLOCKS[..., :200])[..., :128], grid.rounded(BLOCKS[..., :128]))
    assert torch.equal(grid.rounded(BLOCKS[..., :200])[..., 128:], grid.rounded(BLOCKS[..., 128:200]))


@pytest.mark.parametrize(("name", "largest"), [("mxfp8", 8), ("mxfp4", 2)])
def test_powers_of_two_are_those_of_compressed_tensors(name, largest):
    """The exponent of the largest magnitude, one more from 1.75 times a power on, less that of the last level."""
    x = BLOCKS.bfloat16().float()
    blocks, most = grouped(x, 32)
    mantissa, exponent = np.frexp(most)
    scale = np.exp2(exponent - 1 + (mantissa >= 0.875) - largest)
    values = torch.from_numpy(blocks / scale)
    levels = values.clamp(-448, 448).to(torch.float8_e4m3fn).double() if largest == 8 else nearest_even(values.numpy())
    expected = (np.asarray(levels) * scale).reshape(x.shape)
    assert np.array_equal(InputGrid(INPUT_SPECS[name]).rounded(x).numpy(), expected.astype(np.float32))


def test_scales_of_16_over_a_divisor_are_those_of_compressed_tensors():
    divisor_ = torch.tensor([448 * 6 / float(BLOCKS.abs().max())])
    blocks, most = grouped(BLOCKS, 16)
    small = torch.from_numpy(most / 6 * float(divisor_)).float().to(torch.float8_e4m3fn).double().numpy()
    scale = np.where(small == 0, 0.125, small) / float(divisor_)
    assert (small < 2).any()  # of tokens a thousand times as small
    expected = (nearest_even(blocks / scale) * scale).reshape(BLOCKS.shape)
    found = InputGrid(INPUT_SPECS["nvfp4"], divisor_).rounded(BLOCKS).numpy()
    assert (np.abs(found - expected) <= 1e-6 * np.abs(expected)).mean() > 0.999  # ties are decided in float32


def test_levels_of_4_bits_are_the_nearest_with_ties_to_even():
    values = torch.linspace(-8, 8, 1025)  # multiples of 1/64, all ties among them
    expected = nearest_even(values.double().numpy())
    assert np.array_equal(rounded_(values.clone()).numpy(), expected)


def test_a_divisor_holds_first_tokens_as_well():
    x = X.clone()
    x[:, 0] = 1e4
    seen = Peaks(40)
    seen.update(x)
    assert divisor(seen).tolist() == [pytest.approx(448 * 6 / 1e4)]


@pytest.mark.parametrize("name", INPUT_SPECS)
def test_zeros_stay_zeros_and_types_stay(name):
    spec = INPUT_SPECS[name]
    grid = InputGrid(spec, None if spec.dynamic else torch.tensor([0.01]))
    rounded = grid.rounded(torch.zeros(2, 128, dtype=torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    assert not rounded.any()


def test_a_fixed_scale_clips_what_lies_beyond():
    grid = InputGrid(INPUT_SPECS["int8-tensor"], torch.tensor([0.5]))
    assert grid.rounded(torch.tensor([[1e6, -1e6, 0.2, 0.3]])).tolist() == [[63.5, -64.0, 0.0, 0.5]]


def test_ranges_hold_all_that_was_seen_but_first_tokens():
    x = X.clone()
    x[:, 0] = 1e4
    seen = AbsMax(40)
    seen.update(x)
    scale = static_scale(INPUT_SPECS["int8-tensor"], seen, None, torch.float32)
    assert scale.tolist() == [pytest.approx(float(X[:, 1:].abs().max()) / 127.5)]
    for dtype in (torch.bfloat16, torch.float16):
        stored = static_scale(INPUT_SPECS["fp8-tensor"], seen, None, dtype)
        assert torch.equal(stored.to(dtype).float(), stored)


@pytest.mark.parametrize("name", ["int8-tensor", "fp8-tensor"])
def test_the_range_of_least_error_beats_all_others(name):
    spec = INPUT_SPECS[name]
    x = torch.randn(1, 2000, 16, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    x[0, 1, 0] = 60.0  # costs more to hold than to clip, with integers
    seen = Magnitudes()
    seen.update(x)

    def loss(scale):
        return float((InputGrid(spec, scale).rounded(x[:, 1:]) - x[:, 1:]).double().square().sum())

    best = loss(static_scale(spec, seen, None, torch.float32))
    others = [loss(torch.tensor([60 / 127.5 * share])) for share in np.linspace(0.02, 1, 99).tolist()]
    assert best <= 1.02 * min(others)
    if name == "int8-tensor":
        assert best < 0.9 * others[-1]


def test_a_percentile_is_that_of_all_magnitudes():
    x = torch.randn(1, 3001, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    seen = Magnitudes()
    seen.update(x)
    expected = np.percentile(x[:, 1:].float().abs().numpy(), 99, method="inverted_cdf")
    assert seen.percentile(99) == expected
    scale = static_scale(INPUT_SPECS["int8-tensor"], seen, 99, torch.float32)
    assert float(scale) == pytest.approx(expected / 127.5)


@pytest.mark.parametrize("name", ["int8-token", "fp8-group", "mxfp8", "mxfp4"])
def test_what_needs_no_calibration_is_foreseen_as_it_is(name):
    x = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(4))
    assert torch.equal(foreseen(x, INPUT_SPECS[name]), InputGrid(INPUT_SPECS[name]).rounded(x))


def test_before_a_divisor_is_known_each_token_has_its_own():
    x = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 3, 15).view(3, 5, 1)
    x[1, 2] = 0
    seen = foreseen(x, INPUT_SPECS["nvfp4"])
    for token, rounded in zip(x.view(-1, 48), seen.view(-1, 48), strict=True):
        own = 448 * 6 / token.abs().max().clamp_min(1e-5)
        assert torch.equal(rounded, InputGrid(INPUT_SPECS["nvfp4"], own).rounded(token))
