"""Tiles hold what they were made of, by formulas that are written down here once more."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcompress.grids.coded import Coded
from llmcompress.grids.nf4 import Nf4Grid, Nf4Spec
from llmcompress.kernels.compile_errors import TakesNotError
from llmcompress.kernels.tiles import TileSpec, tile_codes, tiled
from madegrids import coded, coded_floats, in_tiles


def channel(block, lane, unit, pair, half):
    """Output and input channel of a code: fragments of mma.m16n8k16 (PTX ISA), and inputs in the order of x in memory.

    Lane 4g + t has rows g and g + 8 of the operand A. In k-step s its columns 2t, 2t + 1, 2t + 8, 2t + 9 are four of 8
    neighbouring inputs, of which two steps take one after the other.
    """
    g, t = lane >> 2, lane & 3
    step, register = pair // 4, pair % 4
    row = g if register in (0, 2) else g + 8
    slot = half + (0 if register < 2 else 2)
    halfway, tile = divmod(unit, 2)
    return (
        block[0] * 32 + tile * 16 + row,
        block[1] * 128 + halfway * 64 + (step // 2) * 32 + t * 8 + (step % 2) * 4 + slot,
    )


def bits_of(pair, half, bits):
    """Bits, lowest first, that hold a code among the bits of its unit's words."""
    if bits == 3 and pair == 15:
        return [32 * word + 16 * half + 15 for word in range(3)]
    per_word = 16 // bits
    first = 32 * (pair // per_word) + 16 * half + bits * (pair % per_word)
    return list(range(first, first + bits))


def untiled(tiles, outputs, inputs, bits):
    """Codes of tiles, bit by bit."""
    words = tiles.numpy()
    codes = np.full((words.shape[0] * 32, words.shape[1] * 128), -1)
    for block in np.ndindex(words.shape[:2]):
        for lane in range(32):
            mine = words[block][:, lane].astype("<i4").reshape(4, bits)
            stored = np.unpackbits(mine.view(np.uint8), axis=1, bitorder="little")
            for unit, pair, half in np.ndindex(4, 16, 2):
                value = sum(int(stored[unit, bit]) << i for i, bit in enumerate(bits_of(pair, half, bits)))
                codes[channel(block, lane, unit, pair, half)] = value
    assert (codes >= 0).all()
    assert not codes[outputs:].any()
    assert not codes[:, inputs:].any()
    return torch.from_numpy(codes[:outputs, :inputs]).to(torch.uint8)


@given(bits=st.sampled_from([2, 3, 4, 8]), outputs=st.integers(1, 65), inputs=st.integers(1, 257), seed=st.integers(0))
@settings(max_examples=12, deadline=None)
def test_codes_lie_where_the_fragments_want_them(bits, outputs, inputs, seed):
    generator = torch.Generator().manual_seed(seed % 2**63)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator).to(torch.uint8)
    tiles = tile_codes(codes, bits)
    assert tiles.dtype == torch.int32
    assert tiles.shape == (-(-outputs // 32), -(-inputs // 128), bits, 32, 4)
    assert torch.equal(untiled(tiles, outputs, inputs, bits), codes)


def test_tiling_in_pieces_is_tiling_at_once(monkeypatch):
    codes = torch.randint(0, 16, (200, 130)).to(torch.uint8)
    whole = tile_codes(codes, 4)
    monkeypatch.setattr("llmcompress.kernels.tiles._CHUNK", 64 * 130)
    assert torch.equal(tile_codes(codes, 4), whole)


@pytest.mark.parametrize(("group", "inputs"), [(32, 160), (64, 192), (128, 256), (256, 512), (-1, 200), (-1, 64)])
def test_scales_and_zero_points_follow_their_channels(group, inputs):
    matrix = coded(70, inputs, 4, group, False)
    weight = tiled(matrix)
    assert weight.spec == TileSpec(4, group if group in (32, 64) else 128, None, torch.float16)
    for output in range(0, 70, 3):
        for channel_in in range(inputs):
            place = (
                output // 32,
                channel_in // 128,
                channel_in % 128 // weight.spec.group,
                output % 8,
                output % 32 // 8,
            )
            index = matrix.grid.group_index[channel_in]
            assert weight.scales[place] == matrix.grid.scale[output, index]
            assert weight.zeros[place] == matrix.grid.zero[output, index]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_are_kept_exactly_in_the_smallest_type(dtype):
    matrix = coded(32, 128, 4, 32, True, scale=dtype)
    weight = tiled(matrix)
    assert weight.scales.dtype == weight.spec.scale == dtype
    assert weight.zeros is None
    assert weight.spec.zero == 8


def test_bytes_are_those_of_the_tensors():
    integers = [coded(70, 300, bits, 32, symmetric) for bits, symmetric in ((3, True), (8, False))]
    for matrix in (*integers, coded_floats("mxfp4", 70, 320), coded_floats("nvfp4", 70, 304)):
        weight = in_tiles(matrix)
        parts = [weight.codes, weight.scales] + ([] if weight.zeros is None else [weight.zeros])
        assert weight.bytes == sum(part.numel() * part.element_size() for part in parts)


def test_channels_in_the_order_of_activation_are_brought_in_the_order_of_groups():
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    matrix = coded(32, 256, 4, 64, False, order=order)
    weight = tiled(matrix)
    assert torch.equal(matrix.grid.group_index[weight.order], torch.arange(256) // 64)
    assert torch.equal(untiled(weight.codes, 32, 256, 4), matrix.codes[:, weight.order])


def test_rows_are_tiles_of_these_rows():
    matrix = coded(100, 128, 4, 64, False)
    part = tiled(matrix).rows(32, 100)
    alone = tiled(matrix.rows(slice(32, 100)))
    assert part.outputs == 68
    for name in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(part, name), getattr(alone, name))


def test_odd_widths_are_kept_in_bytes():
    weight = tiled(coded(32, 128, 5, 64, True))
    assert (weight.spec.bits, weight.spec.zero) == (8, 16)


def test_grids_that_no_kernel_takes_are_refused():
    with pytest.raises(TakesNotError, match="groups of 32, 64, multiples of 128 or whole rows, not of 96"):
        tiled(coded(32, 192, 4, 96, True))
    uneven = coded(32, 128, 4, 64, True)
    uneven.grid.group_index[:] = 0
    with pytest.raises(TakesNotError, match="groups of equal size"):
        tiled(uneven)
    with pytest.raises(TakesNotError, match="whole numbers, not nf4"):
        tiled(Coded(torch.zeros(32, 64, dtype=torch.uint8), Nf4Grid(Nf4Spec(False), torch.ones(32, 1))))
