"""NVFP4 against what compressed-tensors 0.20.0 reads and writes, and its searches against all choices."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from llmcompress.errors import CheckpointError
from llmcompress.grids.coded import Coded
from llmcompress.grids.e2m1 import LEVELS
from llmcompress.grids.fitting import fit as fitted
from llmcompress.grids.grid_type import spec_named
from llmcompress.grids.nvfp4 import GRID, FactoredGrid, Nvfp4Grid, Nvfp4Spec, fit
from llmcompress.solve.damping import damped
from llmcompress.solve.refine import Refiner, row_loss

SCALES = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)  # all positive ones

# of a matrix 4 x 128 of bfloat16 (`golden_weight`), by that package
PACKED = (
    "40667756a2edffef0c64766725dafeffcd40667756a2edffee0c64776725dbfeefce40767756b2fdffef0c64776725ebfeffce40767756b2"
    "edffee1c647767257777676655441390cbddeefeffffffffffefeecdac09314465667777777777660000000088887888ffffffffffefeedd"
    "cdab20436566777777777777665645230000000000000000b65ce278f070d9349e070f872ed56af078f861cb158f870fa64de379f070e943"
    "ad068f871fc56bf178f861ca258e070f974ee479f070e852d77dddd77dddd77ccdd77ccde77ccee77ccee77bbee77bbee77bbee77bbee77a"
    "aff77aaff7799ff7799ff7798ff7780ff7701ff7711ff7711ff7722ff7722ff6"
)
SMALL = "737678797a7b7c7e4441403d7e39353520696969696969690808080707070707"
DIVISOR = 896.0


def golden_weight():
    i = np.arange(128)
    rows = np.stack(
        [
            np.sin(0.37 * i) * (1 + i / 64),
            0.02 * np.cos(0.11 * i) * np.exp(-i / 90),
            np.where(i < 16, 0, 0.5 * np.sin(1.7 * i) ** 3),
            np.cos(2.1 * i) * 1e-4,
        ]
    )
    rows[1, 77] = 3
    return torch.from_numpy(rows).to(torch.bfloat16).to(torch.float32)


def stored(text, *shape):
    return torch.from_numpy(np.frombuffer(bytes.fromhex(text), np.uint8).copy()).view(shape)


GOLDEN = {
    "weight_packed": stored(PACKED, 4, 64),
    "weight_scale": stored(SMALL, 4, 8).view(torch.float8_e4m3fn),
    "weight_global_scale": torch.tensor([DIVISOR]),
}


def weights(rows=12, width=96, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator) * torch.rand(rows, 1, generator=generator)


def same_bytes(one, other):
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_golden_bytes_are_read_and_written_back():
    coded = GRID.unpacked(Nvfp4Spec(), GOLDEN)
    byte = stored(PACKED, 4, 64).numpy()
    codes = np.stack([byte & 15, byte >> 4], axis=2).reshape(4, 128)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes >> 3, -1, 1)
    small = GOLDEN["weight_scale"].to(torch.float64).numpy().repeat(16, axis=1)
    assert np.allclose(coded.decode().numpy(), levels * small / DIVISOR, rtol=1e-6, atol=0)
    packed = coded.grid.packed(coded.codes)
    assert all(same_bytes(packed[name], GOLDEN[name]) for name in GOLDEN)
    kinds = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}
    assert {name: (kinds[item.dtype], tuple(item.shape)) for name, item in packed.items()} == Nvfp4Spec().parts(4, 128)


def test_ranges_that_cover_every_weight_are_those_of_the_library():
    """The same scales and divisor; codes as near as its own, where a weight is in the middle of two."""
    weight = golden_weight()
    grid = fit(weight, "minmax")
    packed = grid.packed(grid.encode(weight))
    assert same_bytes(packed["weight_scale"], GOLDEN["weight_scale"])
    assert torch.equal(grid.divisor, GOLDEN["weight_global_scale"])
    theirs = GRID.unpacked(Nvfp4Spec(), GOLDEN).decode()
    assert torch.allclose((grid.decode(grid.encode(weight)) - weight).abs(), (theirs - weight).abs(), rtol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_search_is_the_best_of_all_scales(weighted):
    weight = weights()
    importance = torch.rand(96, generator=torch.Generator().manual_seed(1)) + 0.1 if weighted else torch.ones(96)

    def lost(grid):
        return ((grid.decode(grid.encode(weight)) - weight).square() * importance).view(12, 6, 16).sum(-1)

    grid = fit(weight, importance=importance)
    every = torch.stack([lost(Nvfp4Grid(grid.spec, torch.full((12, 6), float(s)), grid.divisor)) for s in SCALES])
    assert (lost(grid) <= 1.01 * every.amin(0)).all()  # importance has a floor
    assert lost(grid).sum() < 0.9 * lost(fit(weight, "minmax")).sum()


def test_every_weight_is_as_near_as_any_value():
    weight = weights()
    grid = fit(weight)
    near = (weight[..., None] - grid._spread()[..., None] * torch.tensor(LEVELS)).abs().amin(-1)
    assert torch.allclose((grid.decode(grid.encode(weight)) - weight).abs(), near, rtol=1e-5)


@pytest.mark.parametrize("masked", [False, True], ids=["dense", "masked"])
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8"])
def test_scales_are_refitted_with_their_codes(kind, masked):
    """After descent on codes, groups with another scale and codes of their own lose less; a second time hardly."""
    generator = torch.Generator().manual_seed(1)
    weight, inputs = torch.randn(64, 96, generator=generator), torch.randn(400, 96, generator=generator)
    inputs = inputs @ (torch.eye(96) + 0.1 * torch.randn(96, 96, generator=generator))
    keep = (torch.rand(64, 96, generator=generator) > 0.4).to(torch.float32) if masked else None
    hessian = damped(inputs.T @ inputs / 400, 0.01)
    refiner, grid = Refiner(hessian, torch.arange(96)), fitted(weight, spec_named(kind))
    coded = Coded(grid.encode(weight if keep is None else weight * keep), grid)
    coded, _ = refiner.descend_codes(coded, refiner.gradient(weight, coded), None if keep is None else keep.T)

    slopes = refiner.gradient(weight, coded).T
    again = coded.grid.refit_all(coded.codes, hessian, slopes, torch.float16, keep)
    if keep is not None:
        assert not again.decode()[keep == 0].any()
    before, found = row_loss(weight, coded, hessian), row_loss(weight, again, hessian)
    assert (found <= before * 1.0001).all()
    assert found.sum() < (0.99 if masked else 0.97) * before.sum()


def test_a_mask_stays_where_it_is():
    generator = torch.Generator().manual_seed(1)
    weight, inputs = torch.randn(32, 96, generator=generator), torch.randn(400, 96, generator=generator)
    hessian, keep = damped(inputs.T @ inputs / 400, 0.01), torch.rand(32, 96, generator=generator) < 0.5
    grid = fit(weight * keep)
    coded = Coded(grid.encode(weight * keep), grid)
    found = Refiner(hessian, torch.arange(96)).refine(weight, coded, torch.float16, 2, keep.T.float())
    assert not found.decode()[~keep].any()
    assert row_loss(weight, found, hessian).sum() < row_loss(weight, coded, hessian).sum()


def test_zeros_and_ends_of_the_range_are_kept():
    weight = torch.zeros(3, 32)
    weight[2, 3] = 3e38
    for filled in (weight, weight[:2], weight[:2] + 2.0**-130):
        for clip in ("search", "minmax"):
            grid = fit(filled, clip)
            decoded = grid.decode(grid.encode(filled))
            assert torch.isfinite(decoded).all()
            assert not decoded[0].any() or bool(filled[0].any())
            assert torch.isin(grid.small, SCALES).all()
    assert spec_named("nvfp4").bits_per_weight(4096) == 4.5


def test_rows_of_gguf_are_what_its_package_decodes_and_are_read_back():
    weight = torch.randn(5, 192, generator=torch.Generator().manual_seed(0)) * 0.05
    grid = fit(weight)
    codes = grid.encode(weight)
    rows = grid.gguf_rows(codes)
    theirs = dequantize(rows.numpy(), GGMLQuantizationType.NVFP4)
    assert np.allclose(theirs * grid.gguf_factor.numpy(), grid.decode(codes).numpy(), rtol=1e-6, atol=0)
    again = GRID.of_gguf_rows(grid.spec, rows)
    assert torch.equal(again.codes, codes)
    assert np.array_equal(again.decode().numpy(), theirs)
    with pytest.raises(CheckpointError, match="no whole number"):
        GRID.of_gguf_rows(grid.spec, rows[:, 1:])


def test_scales_of_gguf_have_no_sign_and_none_is_no_number():
    weight = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    rows = fit(weight).gguf_rows(fit(weight).encode(weight))
    rows[0, :4] = torch.tensor([0x7F, 0x00, 0xC0, 0x40], dtype=torch.uint8)
    theirs = dequantize(rows.numpy(), GGMLQuantizationType.NVFP4)
    assert np.array_equal(GRID.of_gguf_rows(fit(weight).spec, rows).decode().numpy(), theirs)


def test_a_factor_stays_as_it_was_stored():
    """Its reciprocal's reciprocal is another number for one in six."""
    factors = torch.rand(64, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert (1 / (1 / factors) != factors).any()
    for factor in factors.split(1):
        grid = FactoredGrid(GRID.made, torch.ones(1, 4), 1 / factor, factor)
        again = GRID.restored(grid.spec, 64, {"small": grid.small, "divisor": grid.divisor, "factor": grid.factor})
        assert torch.equal(again.scale, grid.scale)
        assert torch.equal(again.gguf_factor, factor)
