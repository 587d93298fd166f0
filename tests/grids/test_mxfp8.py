"""MXFP8 against bytes that compressed-tensors 0.20.0 wrote, and its searches against all choices."""

import numpy as np
import pytest
import torch

from llmcompress.grids.grid_type import spec_named
from llmcompress.grids.mxfp8 import GRID, Mxfp8Grid, Mxfp8Spec

# of a matrix 2 x 128 of bfloat16 (`golden_weight`), by its MXFP8QuantizationCompressor
CODES = (
    "006c73777878767165e6f2f7f9faf9f5ee416f76797b7a797368e9f4f9fbfcfbf0e8436971737574726d61e3eff3f5f6f4f1ea496b727577"
    "76746f62e5f1f5f7f8f6f3eb4e6d74777878757163e7f2f7f9f9f8f4ec526f75797a79777264e9f3f8fafaf9f5ed5670777a7b7a787364ea"
    "f4f9fbfbfaf6ee5971787b7c7b7973657a7a7a79797877767472706d696251dbe5eaedf0f2f3f4f5f6f6f7f7f7f7f6f6fdfdfcfbf9f8f6f3"
    "f0eae24e656c7073757778797a7a7b7b7b7b7b7a7a797978373533312e2a24159aa5aaaeb17cb3b5b6b6b7b8b8b8b8b7b7b6b5b4b3b2b1af"
    "f4f1ece43f646c71737578797a7a7b7b7b7c7c7b7b7b7a7979787674726f6b65"
)
EXPONENTS = "777878787170786f"
SPEC = Mxfp8Spec()


def stored(text, *shape):
    return torch.from_numpy(np.frombuffer(bytes.fromhex(text), np.uint8).copy()).view(shape)


GOLDEN = {"weight": stored(CODES, 2, 128).view(torch.float8_e4m3fn), "weight_scale": stored(EXPONENTS, 2, 4)}


def golden_weight():
    i = np.arange(128)
    rows = np.stack([np.sin(0.37 * i) * (1 + i / 64), 0.02 * np.cos(0.11 * i) * np.exp(-i / 90)])
    rows[1, 77] = 3
    return torch.from_numpy(rows).to(torch.bfloat16).to(torch.float32)


def weights(rows=12, width=96, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator) * torch.rand(rows, 1, generator=generator)


def fit(weight, clip="search", importance=None):
    return Mxfp8Grid.fitted(weight, SPEC, clip, importance)


def test_golden_bytes_are_read_and_written_back():
    coded = GRID.unpacked(SPEC, GOLDEN)
    scale = np.exp2(stored(EXPONENTS, 2, 4).numpy().astype(np.float64) - 127).repeat(32, axis=1)
    expected = GOLDEN["weight"].to(torch.float64).numpy() * scale
    assert np.array_equal(coded.decode().numpy(), expected)
    packed = coded.grid.packed(coded.codes)
    assert all(torch.equal(packed[name].view(torch.uint8), GOLDEN[name].view(torch.uint8)) for name in GOLDEN)
    assert {name: tuple(tensor.shape) for name, tensor in packed.items()} == {
        name: shape for name, (_, shape) in SPEC.parts(2, 128).items()
    }
    assert spec_named("mxfp8") == SPEC
    assert SPEC.bits_per_weight(4096) == 8.25


def test_codes_for_covering_scales_are_those_of_the_library():
    weight = golden_weight()
    grid = fit(weight, "minmax")
    assert torch.equal(grid.scale_bytes, GOLDEN["weight_scale"])
    assert torch.equal(grid.encode(weight), stored(CODES, 2, 128))


@pytest.mark.parametrize("weighted", [False, True])
def test_the_search_is_as_good_as_all_exponents(weighted):
    weight = weights()
    importance = torch.rand(96, generator=torch.Generator().manual_seed(1)) + 0.1 if weighted else torch.ones(96)

    def lost(grid):
        return ((grid.decode(grid.encode(weight)) - weight).square() * importance).view(12, 3, 32).sum(-1)

    found = lost(fit(weight, importance=importance))
    every = torch.stack([lost(Mxfp8Grid(SPEC, torch.full((12, 3), float(e)))) for e in range(-24, 1)])
    assert torch.allclose(found, every.amin(0), rtol=0.05)  # a scale twice as large is hardly worse
    assert found.sum() <= lost(fit(weight, "minmax")).sum()


def test_zeros_and_ends_of_the_range_are_kept():
    weight = torch.zeros(3, 32)
    weight[1, 0], weight[2, 3] = 2.0**-130, 3e38
    grid = fit(weight)
    assert torch.isfinite(grid.decode(grid.encode(weight))).all()
    assert not grid.decode(grid.encode(weight))[0].any()
