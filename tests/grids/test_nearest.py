"""Plain rounding, whatever the grid: every value is the nearest of those that its group can hold."""

import pytest
import torch

from llmcompress.grids.base import BLOCK_TYPES, CodebookSpec, GridSpec, Int8Spec, Nf4Spec, ProgressiveSpec
from llmcompress.grids.nearest import nearest, some_rows

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
        (GridSpec(8, -1, type="fp8"), "fp8", 256),
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
    found = nearest(WEIGHT, spec).double().view_as(wide)
    assert ((found - wide).abs() <= near + 1e-3 * most).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_row_of_a_codebook_has_no_more_values_than_its_table(bits):
    found = nearest(WEIGHT, CodebookSpec(bits))
    assert max(len(row.unique()) for row in found) == 1 << bits
    assert (found - WEIGHT).square().sum() < 0.5 ** (2 * bits - 1) * WEIGHT.square().sum()


@pytest.mark.parametrize(
    "spec", [GridSpec(4, 32), GridSpec(4, 64, False), BLOCK_TYPES["Q4_0"], Nf4Spec(), ProgressiveSpec(32)], ids=str
)
def test_four_bits_lose_what_four_bits_lose(spec):
    error = (nearest(WEIGHT, spec) - WEIGHT).norm() / WEIGHT.norm()
    assert 0.05 < error < 0.15


def test_some_rows_are_evenly_spread():
    assert some_rows(torch.arange(10.0).unsqueeze(1), 4)[:, 0].tolist() == [0, 3, 6, 9]
