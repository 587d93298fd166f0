"""Blocks of GGML's types on the emulator: every bit decodes as two readers have it, products within a derived bound."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated import COMPILER, EmulatedLauncher
from llmcompress.grids.blocks import BLOCK_TYPES
from llmcompress.kernels import ggml_products
from llmcompress.kernels.compile_errors import TakesNotError
from llmcompress.kernels.ggml_layout import TYPES, block_weight
from llmcompress.kernels.tensor_checks import shared_limit
from llmcompress.packing.ggml import LAYOUTS, unpack

gguf = pytest.importorskip("gguf")
quants = pytest.importorskip("gguf.quants")

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="no g++"), pytest.mark.usefixtures("poisoned_memory")]
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf_blocks.json").read_text())
ALL = pytest.mark.parametrize("spec", [BLOCK_TYPES[name] for name in TYPES], ids=TYPES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat"])


def blocks(spec, rows, count, seed=0, top=0xBB):
    """Every bit at random, but for the exponents of d and dmin: finite with 0xBB, below 2^-8 or so with 0x9F."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, count, spec.block_bytes), dtype=torch.uint8, generator=generator)
    layout = LAYOUTS[spec.name]
    for at in (layout.d, layout.dmin):
        if at is not None:
            data[..., at + 1] &= top
    return data.flatten(1)


def of_width(spec, width):
    return width // spec.block_size


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["float", "half", "bfloat"])
def test_every_bit_decodes_as_the_gguf_package_and_the_house_do(spec, dtype):
    data = blocks(spec, 37, 5)
    launcher = EmulatedLauncher()
    got = ggml_products.values(launcher, block_weight(data, spec), dtype)
    read = torch.from_numpy(quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[spec.name]))
    assert torch.equal(got, read.to(dtype))
    assert torch.equal(got, unpack(data, spec).decode().to(dtype))
    assert [launch.kernel.name for launch in launcher.launches] == ["ggml_values"]


@ALL
def test_rows_of_llama_quantize_decode_as_the_gguf_package_has_them(spec):
    rows = [bytes.fromhex(text) for kind in GOLDEN["rows"][spec.name].values() for text in kind.values()]
    for row in rows:
        data = torch.tensor([list(row)], dtype=torch.uint8)
        got = ggml_products.values(EmulatedLauncher(), block_weight(data, spec), torch.float32)
        assert np.array_equal(got.numpy(), quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[spec.name]))


@ALL
def test_a_record_takes_the_bytes_of_its_blocks_and_slices_decode_alone(spec):
    data = blocks(spec, 50, of_width(spec, 512))
    weight = block_weight(data, spec)
    assert weight.records.shape[2] == 16 * 256 // spec.block_size * spec.block_bytes
    assert torch.equal(
        ggml_products.values(EmulatedLauncher(), weight.rows(16, 40), torch.float32), unpack(data, spec).decode()[16:40]
    )


def bound(x, coded, y, dtype):
    """Of |error|: rounding of the result, and one float32 operation, cut off, for each 16 products and each warp."""
    weight = coded.decode().double()
    offset = coded.grid.offset
    added = 0 if offset is None else offset.double().abs()[:, coded.grid.group_index]
    size = x.double().abs() @ ((weight - (0 if offset is None else offset[:, coded.grid.group_index])).abs() + added).T
    steps = x.shape[1] // 8 + 32
    return torch.finfo(dtype).eps / 2 * y.abs() * (1 + 2**-10) + steps * 2.0**-23 * size + 2.0**-25


@ALL
@DTYPES
@pytest.mark.parametrize(("tokens", "rows", "width"), [(1, 16, 256), (3, 33, 768), (8, 20, 2560), (13, 17, 512)])
def test_products_are_within_the_bound_of_float32_sums(spec, dtype, tokens, rows, width):
    data = blocks(spec, rows, of_width(spec, width), top=0x9F)
    coded = unpack(data, spec)
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[:, 40] *= 100
    bias = torch.randn(rows)
    launcher = EmulatedLauncher()
    for added in (None, bias):
        y = ggml_products.matmul(launcher, x, block_weight(data, spec), added)
        exact = x.double() @ coded.decode().double().T + (0 if added is None else added.double())
        assert y.dtype == dtype
        assert ((y.double() - exact).abs() <= bound(x, coded, exact, dtype)).all()
    assert [launch.kernel.name for launch in launcher.launches] == ["ggml_matmul"] * 2


@ALL
@DTYPES
def test_one_input_picks_one_column_exactly(spec, dtype):
    """A one among zeros: nothing is added to anything, so that only the last rounding is left."""
    width = 512
    data = blocks(spec, 16, of_width(spec, width), seed=3, top=0x9F)
    values = unpack(data, spec).decode()
    x = torch.zeros(8, width, dtype=dtype)
    for first in range(0, width, 8):
        picked = torch.arange(first, first + 8)
        x.zero_()[torch.arange(8), picked] = 1
        y = ggml_products.matmul(EmulatedLauncher(), x, block_weight(data, spec))
        assert torch.equal(y, values[:, picked].T.to(dtype))


@ALL
def test_strided_and_unaligned_inputs_and_tails_give_the_same(spec):
    width = 544 if spec.block_size == 32 else 768
    data = blocks(spec, 24, of_width(spec, width), top=0x9F)
    weight, x = block_weight(data, spec), torch.randn(10, width).half()
    expected = ggml_products.matmul(EmulatedLauncher(), x, weight)
    wide = torch.full((10, width + 24), float("nan"), dtype=torch.float16)
    for at in (0, 8, 3):
        view = wide[:, at : at + width]
        view.copy_(x)
        assert torch.equal(ggml_products.matmul(EmulatedLauncher(), view, weight), expected)
        view.fill_(float("nan"))
    assert torch.equal(ggml_products.matmul(EmulatedLauncher(), x.T.contiguous().T, weight), expected)
    for rows in (1, 4, 8):  # each row is summed alone
        assert torch.equal(ggml_products.matmul(EmulatedLauncher(), x[:rows], weight), expected[:rows])


@ALL
def test_any_order_of_blocks_and_threads_gives_the_same(spec):
    data = blocks(spec, 40, of_width(spec, 2560), top=0x9F)
    weight, x = block_weight(data, spec), torch.randn(20, 2560).bfloat16()
    found = [ggml_products.matmul(EmulatedLauncher(seed=seed * 100), x, weight) for seed in range(3)]
    assert torch.isfinite(found[0]).all()
    assert all(torch.equal(y, found[0]) for y in found)


@ALL
@pytest.mark.parametrize(("multiprocessors", "width"), [(1, 512), (2, 2304), (3, 5120)])
def test_blocks_that_take_several_tiles_keep_them_apart(spec, multiprocessors, width):
    data = blocks(spec, 100, of_width(spec, width), top=0x9F)
    weight, x = block_weight(data, spec), torch.randn(3, width).half()
    launcher = EmulatedLauncher(multiprocessors=multiprocessors)
    y = ggml_products.matmul(launcher, x, weight)
    assert launcher.launches[0].grid[1] < 7
    assert torch.equal(y, ggml_products.matmul(EmulatedLauncher(multiprocessors=132), x, weight))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 32),
    st.integers(1, 200_000),
    st.integers(1, 160),
    st.sampled_from(TYPES),
    st.sampled_from(["sm_80", "sm_89", "sm_90"]),
)
def test_launches_cover_the_channels_evenly(tokens, channels, processors, name, architecture):
    launcher = EmulatedLauncher(architecture, processors)
    launch = ggml_products.matmul_launch(tokens, channels, BLOCK_TYPES[name], torch.float16, launcher)
    across, tiles = 8 * dict(launch.kernel.defines)["TOKENS"], -(-channels // 16)
    assert launch.kernel in list(ggml_products.variants(architecture))
    assert launch.shared <= shared_limit(architecture)
    assert 0 <= launch.grid[0] * across - tokens < across
    each = -(-tiles // launch.grid[1])
    assert launch.grid[1] == -(-tiles // each)  # none could be left out
    assert launch.grid[0] * launch.grid[1] <= max(2 * processors, launch.grid[0])


@ALL
def test_scales_of_zero_give_zeros(spec):
    weight = block_weight(blocks(spec, 16, of_width(spec, 256), top=0) * 0, spec)
    assert not ggml_products.matmul(EmulatedLauncher(), torch.full((3, 256), 65504.0).half(), weight).any()
    assert not ggml_products.values(EmulatedLauncher(), weight, torch.float16).any()


def test_what_no_kernel_takes_is_refused():
    spec, launcher = BLOCK_TYPES["Q4_K"], EmulatedLauncher()
    weight = block_weight(blocks(spec, 16, 1), spec)
    with pytest.raises(TakesNotError, match="Q3_K"):
        block_weight(blocks(BLOCK_TYPES["Q3_K"], 16, 1), BLOCK_TYPES["Q3_K"])
    with pytest.raises(TakesNotError, match="32 tokens, not 33"):
        ggml_products.matmul(launcher, torch.zeros(33, 256).half(), weight)
    with pytest.raises(TakesNotError, match="256 inputs"):
        ggml_products.matmul(launcher, torch.zeros(1, 255).half(), weight)
    with pytest.raises(TakesNotError, match="float32"):
        ggml_products.matmul(launcher, torch.zeros(1, 256), weight)
    with pytest.raises(TakesNotError, match="bias"):
        ggml_products.matmul(launcher, torch.zeros(1, 256).half(), weight, torch.zeros(1))
    with pytest.raises(TakesNotError, match="channels"):
        ggml_products.matmul_launch(1, 65536 * 16, spec, torch.float16, launcher)
    assert not launcher.launches
