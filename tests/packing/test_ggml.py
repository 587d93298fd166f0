"""Bytes of GGML's block types: every byte string is some matrix, and means what the gguf package reads in it."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcompress.errors import CheckpointError
from llmcompress.grids.blocks import BLOCK_TYPES, BlockGrid
from llmcompress.grids.coded import Coded
from llmcompress.packing.ggml import LAYOUTS, pack, unpack

gguf = pytest.importorskip("gguf")
quants = pytest.importorskip("gguf.quants")

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf_blocks.json").read_text())
ALL = pytest.mark.parametrize("spec", BLOCK_TYPES.values(), ids=BLOCK_TYPES)


def random_bytes(spec, rows, blocks, seed=0):
    """Every bit at random, but for d and dmin, which stay finite."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, blocks, spec.block_bytes), dtype=torch.uint8, generator=generator)
    layout = LAYOUTS[spec.name]
    for at in (layout.d, layout.dmin):
        if at is not None:
            data[..., at + 1] &= 0xBB
    return data.flatten(1)


def read(data, spec):
    """Values as the gguf package decodes them."""
    return torch.from_numpy(quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[spec.name]))


@ALL
def test_every_bit_has_its_place_and_decodes_as_the_gguf_package_does(spec):
    data = random_bytes(spec, 40, 3)
    coded = unpack(data, spec)
    assert torch.equal(pack(coded), data)
    assert torch.equal(coded.decode().view(torch.int32), read(data, spec).view(torch.int32))


@ALL
def test_rows_of_llama_quantize_are_read_and_written(spec):
    for rows in GOLDEN["rows"][spec.name].values():
        for text in rows.values():
            data = torch.tensor([list(bytes.fromhex(text))], dtype=torch.uint8)
            coded = unpack(data, spec)
            assert torch.equal(pack(coded), data)
            assert torch.equal(coded.decode(), read(data, spec))


@ALL
@settings(max_examples=20)
@given(st.data())
def test_unpacking_gives_back_what_was_packed(spec, data):
    rows, blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    groups = blocks * spec.groups_per_block

    def whole(low, high, count):
        return torch.randint(low, high + 1, (rows, count), generator=generator)

    def half():
        return torch.randn(rows, blocks, generator=generator).half().float()

    many = spec.multiples is not None
    grid = BlockGrid(
        spec,
        half(),
        whole(*spec.multiples, groups).float() if many else None,
        half() if spec.minima else None,
        whole(*spec.multiples, groups).float() if many and spec.minima else None,
    )
    coded = Coded(whole(0, spec.levels - 1, blocks * spec.block_size).to(torch.uint8), grid)
    back = unpack(pack(coded), spec)
    assert torch.equal(back.codes, coded.codes)
    assert back.grid.parts.keys() == grid.parts.keys()
    for name, tensor in grid.parts.items():
        assert torch.equal(back.grid.parts[name], tensor), name


@ALL
def test_places_of_bits_fill_a_block_without_overlap(spec):
    layout = LAYOUTS[spec.name]
    taken = torch.zeros(spec.block_bytes, 8, dtype=torch.int64)
    for at in (layout.d, layout.dmin):
        if at is not None:
            taken[at : at + 2] += 1
    for bits in (*layout.codes, *layout.multiples, *layout.minima):
        for plane in range(bits.view[1]):
            first = bits.shift + plane * bits.width
            taken[bits.bytes, first : first + bits.width] += 1
    assert (taken == 1).all()


@ALL
def test_one_row_and_many_are_packed_alike(spec):
    data = random_bytes(spec, 700, 4)
    coded = unpack(data, spec)
    assert torch.equal(pack(coded)[123:124], pack(coded.rows(slice(123, 124))))
    assert pack(coded.rows(slice(0, 0))).shape == (0, data.shape[1])
    assert unpack(data[:0], spec).codes.shape == (0, 4 * spec.block_size)


def test_partial_blocks_are_refused():
    with pytest.raises(CheckpointError, match="143 bytes"):
        unpack(torch.zeros(2, 143, dtype=torch.uint8), BLOCK_TYPES["Q4_K"])
