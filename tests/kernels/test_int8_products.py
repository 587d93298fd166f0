"""Products in int8: codes as `InputGrid` has them, sums exact, scaled as `PackedLinear` does; all on the emulator."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated import COMPILER, EmulatedLauncher
from llmcompress.grids.base import INPUT_SPECS, PER_ROW
from llmcompress.grids.coded import Coded
from llmcompress.grids.inputs import InputGrid
from llmcompress.grids.integer import IntegerSpec, fit
from llmcompress.kernels import int8
from llmcompress.kernels.compile_errors import TakesNotError
from llmcompress.kernels.int8_layout import MOST_INPUTS, TILE, int8_of, int8_weight
from llmcompress.kernels.tensor_checks import shared_limit
from llmcompress.kernels.workspace import Workspace
from llmcompress.validate.packed import PackedLinear

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="no g++"), pytest.mark.usefixtures("poisoned_memory")]
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat"])
TOKEN = InputGrid(INPUT_SPECS["int8-token"])


def rows(tokens, width, dtype, seed=0):
    """Inputs with outliers, a row of zeros, and tiny ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator)
    x[:, width // 3] *= 300
    x[tokens // 2] *= 0 if seed % 2 else 1e-6
    return x.to(dtype)


def weight(channels, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (channels, width), generator=generator).to(torch.int8)
    codes[0] = torch.where(torch.arange(width) % 2 == 0, -128, 127)
    return codes, torch.rand(channels, generator=generator) * 0.01 - 0.002


def product(inputs, codes, scale, bias=None):
    """The exact sums, then float32 in the order of `PackedLinear`, rounded once."""
    y = (inputs.codes[:, : inputs.width].long() @ codes.long().T).to(torch.float32) * inputs.scale.view(-1, 1) * scale
    return (y if bias is None else y + bias).to(inputs.dtype)


@DTYPES
@pytest.mark.parametrize("width", [1, 7, 127, 128, 576, 9000])
def test_codes_of_inputs_are_those_of_the_grid(dtype, width):
    x = rows(5, width, dtype)
    got = int8.quantise(EmulatedLauncher(), x)
    scales = TOKEN.scales(x)
    assert torch.equal(got.scale, scales[:, 0])
    assert torch.equal(got.codes[:, :width].float(), TOKEN.levels(x, scales))
    assert got.codes.shape[1] % TILE == 0
    assert not got.codes[:, width:].any()


@DTYPES
def test_strided_and_unaligned_inputs_have_the_same_codes(dtype):
    x = rows(4, 300, dtype)
    wide = torch.zeros(4, 1, 307, dtype=dtype)
    expected = int8.quantise(EmulatedLauncher(), x)
    for at in (0, 1, 4):
        view = wide[:, 0, at : at + 300]
        view.copy_(x)
        got = int8.quantise(EmulatedLauncher(), view)
        assert torch.equal(got.codes, expected.codes)
        assert torch.equal(got.scale, expected.scale)
    across = x.T.contiguous().T
    assert torch.equal(int8.quantise(EmulatedLauncher(), across).codes, expected.codes)


@DTYPES
def test_a_fixed_scale_serves_all_tokens(dtype):
    x = rows(3, 200, dtype)
    grid = InputGrid(INPUT_SPECS["int8-tensor"], torch.tensor([0.03]))
    got = int8.quantise(EmulatedLauncher(), x, scale=grid.scale)
    assert torch.equal(got.codes[:, :200].float(), grid.levels(x, grid.scale))
    codes, scale = weight(20, 200)
    y = int8.matmul(EmulatedLauncher(), got, int8_weight(codes, scale), Workspace(x.device))
    assert torch.equal(y, product(got, codes, scale))


@DTYPES
@pytest.mark.parametrize("fixed", [None, torch.tensor([0.05])], ids=["own", "fixed"])
def test_what_is_not_finite_shows_in_its_token_alone(dtype, fixed):
    x = rows(4, 130, dtype)
    x[1, 3], x[2, 129] = float("nan"), float("inf")
    launcher, (codes, scale) = EmulatedLauncher(), weight(17, 130)
    y = int8.matmul(launcher, int8.quantise(launcher, x, scale=fixed), int8_weight(codes, scale), Workspace(x.device))
    assert y[1].isnan().all()
    if fixed is None:
        assert not torch.isfinite(y[2]).any()
    else:  # an infinite input is clipped, as a large one
        assert torch.isfinite(y[2]).all()
    assert torch.isfinite(y[[0, 3]]).all()


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "channels", "width"),
    [(1, 33, 200), (16, 130, 128), (17, 129, 300), (40, 70, 130), (65, 300, 260), (129, 257, 130)],
)
def test_products_are_exact(dtype, tokens, channels, width):
    launcher = EmulatedLauncher()
    codes, scale = weight(channels, width)
    bias = torch.randn(channels)
    x = int8.quantise(launcher, rows(tokens, width, dtype))
    for added in (None, bias):
        y = int8.matmul(launcher, x, int8_weight(codes, scale), Workspace(torch.device("cpu")), added)
        assert torch.equal(y, product(x, codes, scale, added))
    assert [launch.kernel.name for launch in launcher.launches] == ["quantise", "int8_matmul", "int8_matmul"]


@pytest.mark.parametrize("tile", [*int8._FEW, *int8._MANY], ids=lambda tile: f"{tile.tokens}x{tile.channels}")
def test_every_tile_multiplies_ragged_matrices(tile, monkeypatch):
    monkeypatch.setattr(int8, "_tiles", lambda tokens, architecture: [tile])
    codes, scale = weight(tile.channels + 9, 520)
    launcher = EmulatedLauncher(multiprocessors=12)
    x = int8.quantise(launcher, rows(tile.tokens + 3, 520, torch.float16))
    y = int8.matmul(launcher, x, int8_weight(codes, scale), Workspace(torch.device("cpu")))
    assert torch.equal(y, product(x, codes, scale))


def test_sums_use_all_of_int32():
    width = 70_000
    launcher = EmulatedLauncher(multiprocessors=1)
    codes, x = torch.full((2, width), -128, dtype=torch.int8), torch.full((1, width), -1.0, dtype=torch.bfloat16)
    x = int8.quantise(launcher, x, scale=torch.tensor([1 / 128]))
    y = int8.matmul(launcher, x, int8_weight(codes, torch.ones(2)), Workspace(torch.device("cpu")))
    assert y.tolist() == [[torch.tensor(128.0 * width).to(torch.bfloat16).item()] * 2]


def test_blocks_that_share_a_tile_give_the_same_in_any_order():
    codes, scale = weight(60, 1300)
    workspace, found = Workspace(torch.device("cpu")), []
    for seed in range(4):
        launcher = EmulatedLauncher(multiprocessors=8, seed=seed * 100)
        x = int8.quantise(launcher, rows(9, 1300, torch.float16))
        found.append(int8.matmul(launcher, x, int8_weight(codes, scale), workspace))
        assert launcher.launches[-1].grid[2] > 1
        assert not workspace.counters(1).any()
    assert torch.equal(found[0], product(x, codes, scale))
    assert all(torch.equal(y, found[0]) for y in found)


@DTYPES
def test_a_matrix_of_a_checkpoint_gives_what_packed_linear_gives(dtype):
    generator = torch.Generator().manual_seed(0)
    matrix, x = torch.randn(70, 192, generator=generator), rows(6, 192, dtype)
    grid = fit(matrix, IntegerSpec(8, PER_ROW), clip="minmax")
    coded = Coded(grid.encode(matrix), grid)
    reference = PackedLinear(coded, None, dtype, TOKEN)
    assert reference.kernel == "int8-int8"
    launcher = EmulatedLauncher()
    y = int8.matmul(launcher, int8.quantise(launcher, x), int8_of(coded), Workspace(x.device))
    assert torch.equal(y, reference(x))


def test_nothing_is_launched_for_nothing():
    launcher, (codes, scale) = EmulatedLauncher(), weight(4, 10)
    x = int8.quantise(launcher, torch.zeros(0, 10, dtype=torch.float16))
    assert int8.matmul(launcher, x, int8_weight(codes, scale), Workspace(torch.device("cpu"))).shape == (0, 4)
    assert not launcher.launches


def test_what_no_kernel_takes_is_refused():
    launcher, (codes, scale) = EmulatedLauncher(), weight(4, 10)
    x = int8.quantise(launcher, torch.zeros(1, 10, dtype=torch.float16))
    workspace = Workspace(torch.device("cpu"))
    with pytest.raises(TakesNotError, match="float32"):
        int8.quantise(launcher, torch.zeros(1, 10))
    with pytest.raises(TakesNotError, match=str(MOST_INPUTS)):
        int8_weight(torch.zeros(1, MOST_INPUTS + 1, dtype=torch.int8), scale[:1])
    with pytest.raises(TakesNotError, match="11"):
        int8.matmul(launcher, x, int8_weight(*weight(4, 11)), workspace)
    with pytest.raises(TakesNotError, match="bias"):
        int8.matmul(launcher, x, int8_weight(codes, scale), workspace, torch.zeros(3))
    with pytest.raises(TakesNotError, match="channels"):
        int8.matmul_launch(1, 65536 * 128, 128, torch.float16, launcher)
    matrix = torch.randn(4, 64)
    for spec in (IntegerSpec(4, PER_ROW), IntegerSpec(8, 32), IntegerSpec(8, PER_ROW, symmetric=False)):
        grid = fit(matrix, spec, clip="minmax")
        with pytest.raises(TakesNotError, match=spec.name):
            int8_of(Coded(grid.encode(matrix), grid))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 5000),
    st.integers(1, 40_000),
    st.integers(1, 40_000),
    st.sampled_from(["sm_80", "sm_86", "sm_89", "sm_90"]),
    st.integers(1, 160),
)
def test_launches_cover_the_output_within_the_limits_of_the_device(tokens, channels, width, architecture, processors):
    launcher = EmulatedLauncher(architecture, processors)
    launch = int8.matmul_launch(tokens, channels, width, torch.float16, launcher)
    defines = dict(launch.kernel.defines)
    assert launch.kernel in list(int8.variants(architecture))
    assert launch.shared <= shared_limit(architecture)
    assert 0 <= launch.grid[0] * defines["TILE_M"] - tokens < defines["TILE_M"]
    assert 0 <= launch.grid[1] * defines["TILE_N"] - channels < defines["TILE_N"]
    assert launch.grid[2] <= max(1, -(-width // TILE) // 4)
    assert launch.grid[2] == 1 or launch.grid[0] * launch.grid[1] * launch.grid[2] <= processors


def test_rows_that_one_ldmatrix_reads_lie_in_eight_places():
    row, chunk = np.meshgrid(np.arange(128), np.arange(8), indexing="ij")
    token = row * 8 + (chunk ^ row % 8)
    channel = row * 8 + (chunk ^ (row % 2 + 2 * (row // 8 % 4)))
    for pieces in (token, channel):
        assert np.array_equal(np.sort(pieces.ravel()), np.arange(128 * 8))
    for at in range(8):
        assert all(len(set(token[first : first + 8, at] % 8)) == 8 for first in range(0, 128, 8))
        for first in range(0, 128, 32):
            owned = []
            for tile in range(4):  # column c of tile j of a group is channel 8 (c / 2) + 2j + c % 2
                channels = [first + c // 2 * 8 + tile * 2 + c % 2 for c in range(8)]
                assert len(set(channel[channels, at] % 8)) == 8
                owned.append(channels)
            for t in range(4):  # lane t has columns 2t, 2t + 1 of each tile: eight channels in a row
                of_lane = [channel for tile in owned for channel in tile[2 * t : 2 * t + 2]]
                assert of_lane == list(range(first + 8 * t, first + 8 * t + 8))
