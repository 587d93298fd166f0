"""Tiles of 8-bit floats against the values of compressed-tensors 0.20.0, and their scales against other ones."""

import hashlib

import numpy as np
import pytest
import torch

from llmcompress.grids.fitting import fit
from llmcompress.grids.tiled_floats import TiledFloatSpec

BLOCK = TiledFloatSpec(128, 128)
# of 130 x 256 values (`golden_weight`): one scale for each block, and the SHA-256 of the codes
SCALES = ((0.002197265625, 0.0022321429569274187), (0.00036839075619354844, 0.0022147041745483875))
CODES = "de3e4d3cfeeabed57c769b1e04c54cc13727ac3a0679fe297adf6a82220f63bc"


def golden_weight():
    n = np.arange(130 * 256)
    values = np.sin(0.013 * n) * np.exp(-((n % 977) / 300))
    return torch.from_numpy(values.astype(np.float32)).view(130, 256).to(torch.bfloat16).to(torch.float32)


def weights(rows, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator) * 0.03


def lost(grid, weight, importance):
    return float(((grid.decode(grid.encode(weight)) - weight).square() * importance).sum())


def test_scales_that_cover_each_block_give_the_golden_codes():
    weight = golden_weight()
    grid = fit(weight, BLOCK, clip="minmax", scale_dtype=torch.float32)
    codes = grid.encode(weight)
    assert grid.scale[[0, 128]].tolist() == [list(row) for row in SCALES]
    # theirs hold zeros with a sign, which say the same
    theirs = (weight / grid._spread(256)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert hashlib.sha256(theirs.view(torch.uint8).numpy().tobytes()).hexdigest() == CODES
    assert torch.equal(grid.levels(codes), theirs.to(torch.float32))


@pytest.mark.parametrize("shape", [(256, 384), (200, 150), (20, 40)])
def test_a_searched_scale_loses_least_of_all_near_and_is_one_for_a_block(shape):
    weight = weights(*shape)
    importance = torch.rand(shape[1], generator=torch.Generator().manual_seed(1)) + 0.1
    grid = fit(weight, BLOCK, importance=importance, scale_dtype=torch.bfloat16)
    assert torch.equal(grid.scale, grid.scale.to(torch.bfloat16).to(torch.float32))
    assert tuple(grid.scale.shape) == (shape[0], -(-shape[1] // 128))
    assert all(len(strip.unique(dim=0)) == 1 for strip in torch.split(grid.scale, 128))
    plain = fit(weight, BLOCK, clip="minmax", scale_dtype=torch.bfloat16)
    assert lost(grid, weight, importance) < lost(plain, weight, importance)
    for factor in np.exp2(np.linspace(-1, 1, 41)):
        other = type(grid)(BLOCK, plain.scale * float(factor))
        assert lost(grid, weight, importance) < 1.06 * lost(other, weight, importance)


def test_scales_stay_where_codes_are_chosen_anew():
    weight = weights(130, 128)
    grid = fit(weight, BLOCK)
    codes = grid.encode(weight)
    again = grid.refit(codes, torch.eye(128), weight, torch.float16)
    assert torch.equal(again.codes, codes)
    assert again.grid is grid


def test_blocks_of_zeros_stay_zeros():
    weight = weights(130, 256)
    weight[:128, 128:] = 0
    grid = fit(weight, BLOCK)
    assert not grid.decode(grid.encode(weight))[:128, 128:].any()
