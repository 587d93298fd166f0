"""MXFP4 against bytes that compressed-tensors 0.20.0 wrote, and its searches against all choices."""

import hashlib

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from llmcompress.errors import CheckpointError
from llmcompress.grids.e2m1 import LEVELS
from llmcompress.grids.grid_type import spec_named
from llmcompress.grids.mxfp4 import GRID, Mxfp4Grid, Mxfp4Spec, fit

# of a matrix 4 x 128 of bfloat16: row 0 is sin(0.37 i) (1 + i / 64), row 1 is 0.02 cos(0.11 i) exp(-i / 90) but for a 3
PACKED = (
    "30656645a2eceede0c64766725dafeffac2054553591dcddcd0a53655614caedeebd30656645a1eceede0b54666614daeeefbd40667756a2"
    "edffee1c647767257766665655341290aacbdcddedeeeeeeffffeeddbc093254656676777777666600000000888878888888888888888888"
    "cd9b20435566767777777767665544230000000000000000c4c4d5d5d5e5e6e60000000000000000d5d5d5e5e6e6e6e60000000000000000"
    "f7f7f7f7f7f7f7f70000000000000000e6e6e6e6e6e6e6e620426476a8caecfe8010325476efcdab20426476a8caecfe8010325476efcdab"
    "20426476a8caecfe8010325476efcdab20426476a8caecfe8010325476efcdab"
)
EXPONENTS = "7d7e7e7e77767e757a7b7b7c7d7d7d7d"
VALUES = "c9ecc62f017cc4f2f1cd9f59a6d7480f47a94a87151ae265044fc72e7edf8393"  # SHA-256 of what it decodes to, float32


def stored(text, *shape):
    return torch.from_numpy(np.frombuffer(bytes.fromhex(text), np.uint8).copy()).view(shape)


GOLDEN = {"weight_packed": stored(PACKED, 4, 64), "weight_scale": stored(EXPONENTS, 4, 4)}


def weights(rows=12, width=96, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator) * torch.rand(rows, 1, generator=generator)


def test_golden_bytes_are_read_and_written_back():
    coded = GRID.unpacked(Mxfp4Spec(), GOLDEN)
    assert hashlib.sha256(coded.decode().numpy().tobytes()).hexdigest() == VALUES
    packed = coded.grid.packed(coded.codes)
    assert all(torch.equal(packed[name], GOLDEN[name]) for name in GOLDEN)
    parts = Mxfp4Spec().parts(4, 128)
    assert {name: ("U8", tuple(tensor.shape)) for name, tensor in packed.items()} == parts


def test_codes_for_golden_scales_are_as_near_as_the_golden_ones():
    """Numbers of bfloat16 are often in the middle of two levels: either will do."""
    i = np.arange(128)
    rows = np.stack([np.sin(0.37 * i) * (1 + i / 64), 0.02 * np.cos(0.11 * i) * np.exp(-i / 90)])
    rows[1, 77] = 3
    weight = torch.from_numpy(rows).to(torch.bfloat16).to(torch.float32)
    grid = Mxfp4Grid(Mxfp4Spec(), GOLDEN["weight_scale"][:2].to(torch.float32) - 127)
    theirs = GRID.unpacked(Mxfp4Spec(), {name: tensor[:2] for name, tensor in GOLDEN.items()}).decode()
    assert torch.equal((grid.decode(grid.encode(weight)) - weight).abs(), (theirs - weight).abs())


def test_every_weight_gets_the_nearest_value():
    weight = weights()
    grid = fit(weight)
    near = (weight[..., None] - grid._spread()[..., None] * torch.tensor(LEVELS)).abs().amin(-1)
    assert torch.equal((grid.decode(grid.encode(weight)) - weight).abs(), near)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_search_is_the_best_of_all_exponents(weighted):
    weight = weights()
    importance = torch.rand(96, generator=torch.Generator().manual_seed(1)) + 0.1 if weighted else torch.ones(96)

    def lost(grid):
        return ((grid.decode(grid.encode(weight)) - weight).square() * importance).view(12, 3, 32).sum(-1)

    found = lost(fit(weight, importance=importance))
    every = torch.stack([lost(Mxfp4Grid(Mxfp4Spec(), torch.full((12, 3), float(e)))) for e in range(-12, 4)])
    assert torch.allclose(found, every.amin(0), rtol=0.005)  # importance has a floor
    absmax = torch.log2(weight.view(12, 3, 32).abs().amax(-1)).floor() - 2  # the rule of the specification
    for plain in (fit(weight, clip="minmax"), Mxfp4Grid(Mxfp4Spec(), absmax)):
        assert found.sum() < lost(plain).sum()


def test_zeros_and_ends_of_the_range_are_kept():
    weight = torch.zeros(3, 32)
    weight[1, 0], weight[2, 3] = 2.0**-130, 3e38
    grid = fit(weight)
    assert torch.isfinite(grid.decode(grid.encode(weight))).all()
    assert not grid.decode(grid.encode(weight))[0].any()
    assert spec_named("mxfp4").bits_per_weight(4096) == 4.25


def test_rows_of_gguf_are_what_its_package_decodes_and_are_read_back():
    weight = torch.randn(5, 192, generator=torch.Generator().manual_seed(0)) * 0.05
    grid = fit(weight)
    codes = grid.encode(weight)
    rows = grid.gguf_rows(codes)
    theirs = dequantize(rows.numpy(), GGMLQuantizationType.MXFP4)
    assert np.array_equal(theirs, grid.decode(codes).numpy())
    again = GRID.of_gguf_rows(grid.spec, rows)
    assert torch.equal(again.codes, codes)
    assert np.array_equal(again.decode().numpy(), theirs)
    with pytest.raises(CheckpointError, match="no whole number"):
        GRID.of_gguf_rows(grid.spec, rows[:, 1:])
