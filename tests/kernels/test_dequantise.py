"""The kernel decodes every code, scale and zero point to the bit, as the grid itself does."""

import pytest
import torch

from emulated import COMPILER, EmulatedLauncher
from llmcompress.kernels.dequantise import dequantise, variants
from llmcompress.kernels.tiles import tiled
from madegrids import coded, coded_floats, in_tiles

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="no g++"), pytest.mark.usefixtures("poisoned_memory")]


def check(matrix, dtype):
    launcher, weight = EmulatedLauncher(), in_tiles(matrix)
    dense = dequantise(launcher, weight, dtype)
    assert [launch.kernel.name for launch in launcher.launches] == ["dequantise"]
    expected = matrix.decode().to(dtype)
    assert torch.equal(dense, expected if weight.order is None else expected[:, weight.order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_code_meets_every_zero_point(bits, symmetric, group, dtype):
    matrix = coded(264, 128, bits, group, symmetric)
    matrix.codes[:] = ((torch.arange(264)[:, None] * 31 + torch.arange(128)) % (1 << bits)).to(torch.uint8)
    if not symmetric:
        matrix.grid.zero[:] = (torch.arange(264) % (1 << bits))[:, None].float()
    check(matrix, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(264, 128), (33, 160), (1, 32)])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_every_float_of_four_bits_meets_every_scale(name, outputs, inputs, dtype):
    check(coded_floats(name, outputs, inputs), dtype)


@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float32])
def test_scales_of_every_type_are_exact(scale):
    check(coded(64, 256, 4, 32, True, scale=scale), torch.float16)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 127), (40, 136), (7, 1000)])
def test_sizes_need_not_fit_the_tiles(outputs, inputs):
    check(coded(outputs, inputs, 4, 128, True), torch.float16)


def test_odd_widths_and_activation_order():
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    check(coded(40, 256, 6, 64, True, order=order), torch.bfloat16)


def test_slabs_are_parts_of_the_whole():
    weight, launcher = tiled(coded(100, 256, 3, 64, False)), EmulatedLauncher()
    whole = dequantise(launcher, weight, torch.float16)
    slabs = [
        dequantise(launcher, weight.rows(start, min(start + 32, 100)), torch.float16) for start in range(0, 100, 32)
    ]
    assert torch.equal(torch.cat(slabs), whole)


def test_variants_are_what_is_launched():
    launcher = EmulatedLauncher()
    dequantise(launcher, tiled(coded(32, 128, 4, 128, True)), torch.bfloat16)
    assert launcher.launches[0].kernel in list(variants("sm_90"))
