"""Plain rounding, whatever the grid: every value is the nearest of those that its group can hold."""

import gguf
import pytest
import torch

from llmcompress.grids.blocks import BLOCK_TYPES
from llmcompress.grids.codebook import CodebookSpec
from llmcompress.grids.float8 import Float8Spec
from llmcompress.grids.int8 import Int8Spec
from llmcompress.grids.integer import IntegerSpec
from llmcompress.grids.nearest import nearest, some_rows
from llmcompress.grids.nf4 import Nf4Spec
from llmcompress.grids.progressive import ProgressiveSpec
from llmcompress.workers import SERIAL

WEIGHT = torch.randn(6, 256, generator=torch.Generator().manual_seed(0)) * 0.05


def levels_of(kind):
    """Levels in units of a group's largest magnitude, ascending, from definitions."""
    if kind == "fp8":
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)
        return codes[codes.isfinite()].unique() / 448
    if kind == "int8":
        return torch.arange(-127, 128, dtype=torch.float64) / 127
    shares = torch.linspace(1 - (1 / 32 + 1 / 30) / 2, 0.5, 9, dtype=torch.float64)
    below = torch.linspace(1 - (1 / 32 + 1 / 30) / 2, 0.5, 8, dtype=torch.float64)
    above = torch.special.ndtri(shares[:-1])
    return torch.cat([-torch.special.ndtri(below), above]).unique() / above.max()


@pytest.mark.parametrize(
    ("spec", "kind", "group"),
    [
        (Float8Spec(), "fp8", 256),
        (Int8Spec(), "int8", 256),
        (Int8Spec(16), "int8", 256),
        (Nf4Spec(double=False), "nf4", 64),
    ],
    ids=str,
)
def test_values_are_the_nearest_of_a_range_that_covers_every_weight(spec, kind, group):
    wide = WEIGHT.double().view(6, -1, group)
    most = wide.abs().amax(-1, keepdim=True)
    values = levels_of(kind) * most
    near = (wide.unsqueeze(-1) - values.unsqueeze(-2)).abs().amin(-1)
    found = nearest(WEIGHT, spec, SERIAL).double().view_as(wide)
    assert ((found - wide).abs() <= near + 1e-3 * most).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_row_of_a_codebook_has_no_more_values_than_its_table(bits):
    found = nearest(WEIGHT, CodebookSpec(bits), SERIAL)
    assert max(len(row.unique()) for row in found) == 1 << bits
    assert (found - WEIGHT).square().sum() < 0.5 ** (2 * bits - 1) * WEIGHT.square().sum()


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_are_the_nearest_of_a_range_that_covers_a_group(group, symmetric):
    wide = WEIGHT.double().view(6, -1, group)
    most = wide.abs().amax(-1, keepdim=True)
    low = -most if symmetric else wide.amin(-1, keepdim=True).clamp(max=0)
    step = ((most if symmetric else wide.amax(-1, keepdim=True).clamp(min=0)) - low) / 15
    zero = 8 if symmetric else (-low / step).round().unsqueeze(-1)
    values = (torch.arange(16) - zero) * step.unsqueeze(-1)
    near = (wide.unsqueeze(-1) - values).abs().amin(-1)
    found = nearest(WEIGHT, IntegerSpec(4, group, symmetric), SERIAL).double().view_as(wide)
    assert ((found - wide).abs() <= near + 2**-11 * 16 * step).all()  # steps are stored in 16 bits


def test_quantised_scales_are_as_near_as_their_codes_and_values_the_nearest_for_them():
    wide = WEIGHT.double().view(6, -1, 64)
    found = nearest(WEIGHT, Nf4Spec(), SERIAL).double().view_as(wide)
    scale = found.gather(-1, wide.abs().argmax(-1, keepdim=True)).abs()  # the largest weight has the level 1 or -1
    most = wide.abs().amax(-1, keepdim=True)
    # codes of scales divide (0.1, 1) of the largest deviation from their mean into 64 parts, and stand in the middles
    assert ((scale - most).abs() <= 0.9 / 64 * (most - most.mean()).abs().max() + 1e-6 * most).all()
    near = (wide.unsqueeze(-1) - levels_of("nf4") * scale.unsqueeze(-1)).abs().amin(-1)
    assert ((found - wide).abs() <= near + 1e-6 * most).all()


def test_blocks_lose_less_than_where_the_gguf_package_rounds_them():
    quantised = gguf.quants.quantize(WEIGHT.numpy(), gguf.GGMLQuantizationType.Q4_0)
    theirs = torch.from_numpy(gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType.Q4_0))
    assert (nearest(WEIGHT, BLOCK_TYPES["Q4_0"], SERIAL) - WEIGHT).norm() < (theirs - WEIGHT).norm()


def test_values_of_progressive_groups_are_whole_multiples_of_the_row_and_nearest():
    """QServe, arXiv:2405.04532: 119 of a row's scale cover it; groups have a whole multiple s1 and a zero point."""
    wide = WEIGHT.double().view(6, -1, 32)
    row = (WEIGHT.abs().amax(1, keepdim=True) / 119).to(torch.float16).double().unsqueeze(-1)
    low, high = wide.amin(-1, keepdim=True).clamp(max=0), wide.amax(-1, keepdim=True).clamp(min=0)
    step = ((high - low) / row / 15).ceil().clamp(1, 16)
    values = (torch.arange(16) - (-low / row / step).round().unsqueeze(-1)) * (step * row).unsqueeze(-1)
    near = (wide.unsqueeze(-1) - values).abs().amin(-1)
    found = nearest(WEIGHT, ProgressiveSpec(32), SERIAL).double().view_as(wide)
    assert torch.allclose((found - wide).abs(), near, rtol=0, atol=1e-6)
    assert ((found / row) - (found / row).round()).abs().max() < 1e-4


def test_some_rows_are_evenly_spread():
    assert some_rows(torch.arange(10.0).unsqueeze(1), 4)[:, 0].tolist() == [0, 3, 6, 9]
