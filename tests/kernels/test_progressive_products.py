"""Products with progressive groups: whole numbers and sums exact, as the grid and another reader have them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated import COMPILER, EmulatedLauncher
from llmcompress.formats.base import Entry, TensorSpec
from llmcompress.formats.qoq import FORMAT
from llmcompress.grids.coded import Coded
from llmcompress.grids.integer import IntegerSpec
from llmcompress.grids.integer import fit as fit_integer
from llmcompress.grids.progressive import PROGRESSIVE_GROUPS, ProgressiveGrid, ProgressiveSpec, fit
from llmcompress.grids.scales import natural_groups
from llmcompress.kernels import int8, progressive
from llmcompress.kernels.compile_errors import TakesNotError
from llmcompress.kernels.progressive_layout import progressive_of
from llmcompress.kernels.workspace import Workspace

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="no g++"), pytest.mark.usefixtures("poisoned_memory")]
GROUPS = pytest.mark.parametrize("size", PROGRESSIVE_GROUPS)
CPU = torch.device("cpu")


def matrix(channels, width, size, seed=0):
    """Any multiples and zero points, and any codes that stay within int8."""
    generator = torch.Generator().manual_seed(seed)
    spec = ProgressiveSpec(size)
    shape = channels, width // size
    grid = ProgressiveGrid(
        spec,
        torch.rand(channels, 1, generator=generator).add(0.1).half().float() / 64,
        torch.randint(1, 17, shape, generator=generator).float(),
        torch.randint(0, 16, shape, generator=generator).float(),
        natural_groups(spec, width),
    )
    low, high = (bound[:, grid.group_index] for bound in grid.bounds)
    levels = low + torch.rand(channels, width, generator=generator).mul(high - low + 1).floor()
    return Coded(grid.codes(levels.clamp(low, high)), grid)


def inputs(launcher, tokens, width, dtype=torch.float16, seed=0):
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))
    x[:, width // 2] *= 100
    return int8.quantise(launcher, x.to(dtype))


def product(x, coded, bias=None):
    whole = coded.grid.whole(coded.codes).long()
    sums = x.codes[:, : x.width].long() @ whole.T
    y = sums.float() * x.scale.view(-1, 1) * coded.grid.row_scale[:, 0]
    return (y if bias is None else y + bias).to(x.dtype)


@GROUPS
def test_every_multiple_zero_point_and_code_within_int8_becomes_its_whole_number(size):
    multiple, zero = torch.meshgrid(torch.arange(1.0, 17), torch.arange(16.0), indexing="ij")
    spec, width = ProgressiveSpec(size), 256
    groups = width // size
    grid = ProgressiveGrid(
        spec,
        torch.ones(256, 1),
        multiple.reshape(256, 1).expand(-1, groups),
        zero.reshape(256, 1).roll(7).expand(-1, groups),
        natural_groups(spec, width),
    )
    low, high = (bound[:, grid.group_index] for bound in grid.bounds)
    codes = grid.codes((torch.arange(width) % 16 - grid.zero[:, grid.group_index]).clamp(low, high))
    got = progressive.expand(EmulatedLauncher(), progressive_of(Coded(codes, grid))).codes
    assert (got.min(), got.max()) == (-126, 126)  # no multiple up to 16 of a level up to 15 is 127
    assert torch.equal(got.short(), grid.whole(codes))


@GROUPS
@pytest.mark.parametrize(("tokens", "channels", "width"), [(1, 17, 128), (8, 100, 1152), (13, 40, 384), (27, 70, 640)])
def test_products_are_exact(size, tokens, channels, width):
    coded, launcher = matrix(channels, width, size), EmulatedLauncher()
    for dtype, bias in ((torch.float16, None), (torch.bfloat16, torch.randn(channels))):
        x = inputs(launcher, tokens, width, dtype)
        y = progressive.matmul(launcher, x, progressive_of(coded), Workspace(CPU), bias)
        assert torch.equal(y, product(x, coded, bias))
        assert launcher.launches[-1].kernel.source == "progressive.cu"


@pytest.mark.parametrize("tokens", [50, 64, 65, 128, 129])
def test_more_tokens_take_more_tiles_and_then_int8(tokens):
    coded, launcher = matrix(130, 224, 32), EmulatedLauncher()
    x = inputs(launcher, tokens, 224)
    y = progressive.matmul(launcher, x, progressive_of(coded), Workspace(CPU))
    assert torch.equal(y, product(x, coded))
    expected = ["quantise.cu", "progressive.cu"] if tokens <= 128 else ["quantise.cu", "expand.cu", "int8.cu"]
    assert [launch.kernel.source for launch in launcher.launches] == expected


@pytest.mark.parametrize("tokens", [3, 12, 40])
def test_blocks_that_share_a_tile_give_the_same_in_any_order(tokens):
    coded, workspace, found = matrix(20, 4096, 128), Workspace(CPU), []
    for seed in range(3):
        launcher = EmulatedLauncher(multiprocessors=6, seed=seed * 100)
        x = inputs(launcher, tokens, 4096)
        found.append(progressive.matmul(launcher, x, progressive_of(coded), workspace))
        assert launcher.launches[-1].grid[2] > 1
        assert not workspace.counters(1).any()
    assert torch.equal(found[0], product(x, coded))
    assert all(torch.equal(y, found[0]) for y in found)


def test_a_file_is_multiplied_as_it_decodes():
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(0))
    grid = fit(weight, ProgressiveSpec(64))
    entry = Entry(TensorSpec("m.weight", "F16", (48, 256)), grid.spec)
    tensors = FORMAT.encode(entry, Coded(grid.encode(weight), grid))
    config = {"quantization_config": FORMAT.config([entry], {})["config.json"]["quantization_config"]}
    coded = FORMAT.decode("m", tensors.__getitem__, config)
    launcher = EmulatedLauncher()
    x = inputs(launcher, 4, 256)
    y = progressive.matmul(launcher, x, progressive_of(coded), Workspace(CPU))
    exact = (x.codes[:, :256].double() * x.scale[:, None].double()) @ coded.decode().double().T
    assert torch.allclose(y.double(), exact, rtol=2**-11 + 2**-22, atol=2**-25)
    # a word of the file is a word of ours: the layout only moves them
    assert torch.equal(
        progressive_of(coded).words.flatten().sort().values, tensors["m.qweight"].flatten().sort().values
    )


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.sampled_from(PROGRESSIVE_GROUPS), st.integers(0, 99))
def test_every_lane_finds_its_codes_and_groups(channels, blocks, size, seed):
    coded = matrix(channels, blocks * size, size, seed)
    weight = progressive_of(coded)
    words = weight.words.numpy().view(np.uint32)
    width = words.shape[1] * 64
    assert width % 128 == 0
    assert weight.groups.shape == (words.shape[0], width // size, 8, 4)
    codes, multiple, zero = (part.numpy() for part in (coded.codes, coded.grid.multiple, coded.grid.zero))
    for tile, block, lane, word in np.ndindex(words.shape[0], words.shape[1], 32, 4):
        g, t = divmod(lane, 4)
        channel = 16 * tile + 8 * (word % 2) + g
        for i in range(8):  # bytes hold inputs 0 ... 3 in their low and 4 ... 7 in their high halves
            k = 64 * block + 16 * t + 8 * (word // 2) + i
            code = words[tile, block, g, t, word] >> (8 * (i % 4) + 4 * (i // 4)) & 15
            inside = channel < channels and k < codes.shape[1]
            assert code == (codes[channel, k] if inside else 0)
    for tile, group, g, half in np.ndindex(words.shape[0], width // size, 8, 2):
        channel = 16 * tile + 8 * half + g
        inside = channel < channels and group < blocks
        s1, offset = weight.groups[tile, group, g, 2 * half : 2 * half + 2].tolist()
        assert s1 == (multiple[channel, group] if inside else 0)
        assert offset == (multiple[channel, group] * zero[channel, group] if inside else 0)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 128), st.integers(1, 40_000), st.integers(1, 300), st.integers(1, 160))
def test_launches_cover_the_output(tokens, channels, blocks, processors):
    launcher = EmulatedLauncher(multiprocessors=processors)
    launch = progressive.matmul_launch(tokens, channels, blocks * 128, 128, torch.float16, launcher)
    defines = dict(launch.kernel.defines)
    assert launch.kernel in list(progressive.variants("sm_90"))
    assert launch.shared <= 48 << 10
    across, along = 8 * defines["TOKENS"], 16 * defines["CHANNELS"] * defines["WARPS_N"]
    assert 0 <= launch.grid[0] * across - tokens < across
    assert 0 <= launch.grid[1] * along - channels < along
    assert launch.grid[2] == 1 or launch.grid[0] * launch.grid[1] * launch.grid[2] <= processors


def test_what_no_kernel_takes_is_refused():
    launcher, coded = EmulatedLauncher(), matrix(20, 256, 64)
    weight, workspace = progressive_of(coded), Workspace(CPU)
    with pytest.raises(TakesNotError, match="128"):
        progressive.matmul(launcher, inputs(launcher, 1, 128), weight, workspace)
    with pytest.raises(TakesNotError, match="bias"):
        progressive.matmul(launcher, inputs(launcher, 1, 256), weight, workspace, torch.zeros(19))
    ordered = fit(torch.randn(20, 256), coded.grid.spec, clip="minmax", order=torch.randperm(256))
    with pytest.raises(TakesNotError, match="natural order"):
        progressive_of(Coded(coded.codes, ordered))
    grid = fit_integer(torch.randn(4, 64), IntegerSpec(4, 32), clip="minmax")
    with pytest.raises(TakesNotError, match="int4-g32-sym"):
        progressive_of(Coded(grid.encode(torch.randn(4, 64)), grid))
