"""Codes on integer grids as block types: the gguf package decodes the very values that the integer grid has."""

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcompress.grids.base import PER_ROW
from llmcompress.grids.blocks import BLOCK_TYPES
from llmcompress.grids.coded import Coded
from llmcompress.grids.integer import IntegerGrid, IntegerSpec
from llmcompress.grids.progressive import ProgressiveSpec
from llmcompress.grids.progressive import fit as fit_progressive
from llmcompress.grids.recode import recode
from llmcompress.grids.scales import natural_groups
from llmcompress.packing.ggml import pack

WIDTH = 256


def coded(bits, size=32, sym=True, rows=3, seed=0, scale=None, index=None, codes=None):
    """Random codes on a random grid whose scales are float16 values of either sign."""
    dice = torch.Generator().manual_seed(seed)
    spec = IntegerSpec(bits, size, sym)
    shape = (rows, spec.groups(WIDTH))
    scale = torch.randn(shape, generator=dice).half().float() if scale is None else torch.full(shape, scale)
    zero = torch.full(shape, spec.middle) if sym else torch.randint(0, spec.levels, shape, generator=dice)
    codes = torch.randint(0, spec.levels, (rows, WIDTH), generator=dice) if codes is None else codes
    index = natural_groups(spec, WIDTH) if index is None else index
    return Coded(codes.to(torch.uint8), IntegerGrid(spec, scale, zero.float(), index))


def read_back(found, kind):
    return torch.from_numpy(gguf.quants.dequantize(pack(found).numpy(), gguf.GGMLQuantizationType[kind]))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([2, 3, 4]), st.sampled_from([32, 64, 128, 256, PER_ROW]), st.integers(0, 1 << 30))
def test_symmetric_codes_of_up_to_four_bits_are_q4_0_exactly(bits, size, seed):
    source = coded(bits, size, seed=seed)
    found = recode(source, BLOCK_TYPES["Q4_0"])
    assert found is not None
    assert torch.equal(read_back(found, "Q4_0"), source.decode())


@pytest.mark.parametrize(
    ("bits", "sym", "kind"),
    [
        (4, True, "Q5_0"),
        (4, True, "Q8_0"),
        (5, True, "Q5_0"),
        (6, True, "Q8_0"),
        (4, False, "Q5_0"),
        (5, False, "Q8_0"),
    ],
)
def test_wider_types_hold_every_level_of_narrower_grids(bits, sym, kind):
    source = coded(bits, sym=sym)
    found = recode(source, BLOCK_TYPES[kind])
    assert found is not None
    assert torch.equal(read_back(found, kind), source.decode())


@pytest.mark.parametrize(("bits", "kind"), [(4, "Q4_1"), (3, "Q4_1"), (4, "Q5_1"), (5, "Q5_1")])
def test_asymmetric_codes_keep_their_codes_and_lose_what_float16_cannot_hold_of_the_minimum(bits, kind):
    exact = coded(bits, sym=False, scale=0.25)
    assert torch.equal(read_back(recode(exact, BLOCK_TYPES[kind]), kind), exact.decode())
    source = coded(bits, sym=False)
    found = recode(source, BLOCK_TYPES[kind])
    assert torch.equal(found.codes, source.codes)
    least = (source.grid.scale * source.grid.zero).abs().repeat_interleave(32, dim=1)
    off = (read_back(found, kind) - source.decode()).abs()
    assert bool((off <= 2.0**-11 * least + 1e-7).all())
    assert bool((off > 0).any())


def test_eight_bits_are_q8_0_unless_a_level_lies_below_those_that_encoders_choose():
    codes = torch.randint(1, 256, (3, WIDTH), generator=torch.Generator().manual_seed(0))
    source = coded(8, codes=codes)
    assert torch.equal(read_back(recode(source, BLOCK_TYPES["Q8_0"]), "Q8_0"), source.decode())
    codes[2, 200] = 0
    assert recode(coded(8, codes=codes), BLOCK_TYPES["Q8_0"]) is None


@pytest.mark.parametrize(
    "source",
    [
        coded(4, sym=False),  # levels beyond -8 ... 7
        coded(5),
        coded(4, 16),  # groups smaller than a block
        coded(4, index=torch.arange(WIDTH).flip(0) % 8),  # groups in another order
        coded(4, scale=1e5),
        coded(4, scale=1e-9),
        coded(4, scale=float("nan")),
        coded(4, scale=float("inf")),
    ],
)
def test_what_q4_0_has_no_place_for_is_left_to_others(source):
    assert recode(source, BLOCK_TYPES["Q4_0"]) is None


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_NL", "IQ4_XS", "Q2_K"])
def test_types_with_scales_of_scales_or_uneven_levels_are_left_to_encoders(kind):
    assert recode(coded(4), BLOCK_TYPES[kind]) is None


def test_groups_in_another_order_that_keeps_blocks_whole_are_recoded():
    source = coded(4, index=torch.arange(8).flip(0).repeat_interleave(32))
    assert torch.equal(read_back(recode(source, BLOCK_TYPES["Q4_0"]), "Q4_0"), source.decode())


def test_codes_of_progressive_groups_are_kept_in_q4_1():
    weight = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(3)) * 0.1
    grid = fit_progressive(weight, ProgressiveSpec(64))
    source = Coded(grid.encode(weight), grid)
    found = recode(source, BLOCK_TYPES["Q4_1"])
    assert found is not None
    assert torch.equal(found.codes, source.codes)
    reach = 15 * grid.scale.amax() * 2**-10  # of rounding scales and minima to float16
    assert (read_back(found, "Q4_1") - source.decode()).abs().max() <= reach
