"""Quantised keys and values against brute force in numpy: token by token, and over all values of float8."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmcompress.grids.cache import by_scale, by_token, scale_of


def states(dtype=torch.float32, spread=3.0):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 3, 7, 16, generator=generator)
    return (x * spread * torch.linspace(0.1, 4, 16) + 0.7).to(dtype)


def e4m3():
    """Every finite value of float8 e4m3, from its definition: bias 7, three bits of mantissa, no infinity."""
    subnormal = [m * 2.0**-9 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if not (e == 15 and m == 7)]
    values = np.array(subnormal + normal)
    return np.unique(np.concatenate([-values, values]))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_and_head_has_a_range_of_its_own(bits, dtype):
    x = states(dtype)
    found = by_token(x, bits)
    assert found.dtype == dtype
    assert found.shape == x.shape
    for place in np.ndindex(2, 3, 7):
        row = x[place].float().numpy()
        low = np.float32(np.float16(row.min()))
        scale = np.float32(np.float16((row.max() - row.min()) / np.float32(2**bits - 1)))
        codes = np.clip(np.round((row - low) / scale), 0, 2**bits - 1).astype(np.float32)
        assert len(np.unique(codes)) > 4
        assert torch.equal(found[place], torch.from_numpy(codes * scale + low).to(dtype))


@given(st.integers(0, 2**31), st.sampled_from([4, 8]), st.floats(1e-3, 1e3))
def test_no_value_moves_by_more_than_half_a_step_and_what_float16_rounds_away(seed, bits, spread):
    x = torch.randn(1, 2, 3, 32, generator=torch.Generator().manual_seed(seed)) * spread
    step = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / (2**bits - 1)
    edge = x.abs().amax(-1, keepdim=True) * 2.0**-11 + step * (2**bits - 1) * 2.0**-11 + 2.0**-24 * 2**bits
    assert bool(((by_token(x, bits) - x).abs() <= step * 0.501 + edge).all())


def test_a_token_of_equal_values_is_kept():
    assert torch.equal(by_token(torch.full((1, 1, 2, 8), 0.25), 4), torch.full((1, 1, 2, 8), 0.25))


def test_fp8_takes_the_nearest_of_its_values_and_saturates():
    x = states(spread=20.0)
    scale = torch.tensor([0.125])
    grid = e4m3()
    found = by_scale(x, scale, "fp8") / scale
    wanted = np.clip(x.numpy().astype(np.float64) / 0.125, -448, 448)
    distance = np.abs(wanted[..., None] - grid).min(-1)
    assert np.abs(wanted).max() == 448  # some do not fit
    assert np.isin(found.numpy(), grid).all()
    np.testing.assert_allclose(np.abs(found.numpy() - wanted), distance, rtol=1e-6, atol=1e-6)


def test_int8_rounds_and_saturates():
    x = states()
    found = by_scale(x, torch.tensor([0.05]), "int8")
    codes = np.clip(np.round(x.numpy() / np.float32(0.05)), -128, 127)
    assert codes.max() == 127
    np.testing.assert_array_equal(found.numpy(), codes.astype(np.float32) * np.float32(0.05))


def test_scales_of_heads_are_those_of_their_heads():
    x, scales = states(), torch.tensor([0.01, 0.1, 1.0]).view(3, 1, 1)
    found = by_scale(x, scales, "fp8")
    for head in range(3):
        assert torch.equal(found[:, head], by_scale(x[:, head], scales[head, 0], "fp8"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("code", ["fp8", "int8"])
def test_a_scale_is_the_least_of_its_type_under_which_nothing_saturates(dtype, code):
    end = {"fp8": 448, "int8": 127}[code]
    for largest in (6.625, 35.0, 1.0e-3, 300.7):
        scale = scale_of(largest, code, dtype)
        assert (scale.shape, scale.dtype) == ((1,), dtype)
        assert float(scale.double()) * end >= largest
        below = torch.nextafter(scale, torch.zeros_like(scale)).double()
        assert float(below) * end < largest
    assert scale_of(0.0, code, dtype).item() == 1


def test_nvfp4_takes_the_nearest_level_under_the_scale_of_each_block():
    """Brute force: the scale of a block is its largest magnitude over 6, the nearest value of float8."""
    x, scale = states(spread=20.0), 0.125
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = np.concatenate([-levels, levels])
    found = by_scale(x, torch.tensor([scale]), "nvfp4").numpy().astype(np.float64)
    eighths = e4m3()
    for place in np.ndindex(2, 3, 7):
        values = x[place].numpy().astype(np.float64) / scale
        small = eighths[np.abs(eighths - np.abs(values).max() / 6).argmin()]
        distance = np.abs(values[:, None] - levels * small).min(-1)
        assert np.abs(np.abs(found[place] / scale - values) - distance).max() <= 1e-4 * np.abs(values).max()


def test_nvfp4_keeps_zeros_and_saturates_far_beyond_its_scale():
    x = torch.zeros(1, 1, 1, 32)
    assert torch.equal(by_scale(x, torch.ones(1), "nvfp4"), x)
    x[..., 0] = 1e6
    assert float(by_scale(x, torch.ones(1), "nvfp4").max()) == 448 * 6
