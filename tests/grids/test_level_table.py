"""The nearest level by cells is the one that a binary search over midpoints finds."""

import pytest
import torch

from llmcompress.grids import e2m1, nf4
from llmcompress.grids.blocks import IQ4_LEVELS
from llmcompress.grids.level_table import level_table
from llmcompress.grids.scales import between

TABLES = {
    "nf4": nf4.LEVELS,
    "e2m1": e2m1.LEVELS,
    "iq4": IQ4_LEVELS,
    "two": (-1.0, 3.0),
    "near": (0.0, 0.001, 1.0),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_value_goes_where_a_search_puts_it(name):
    levels = torch.tensor(TABLES[name], dtype=torch.float32)
    middles = between(levels)
    size = float(levels.abs().max())
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * size
    on = torch.cat([levels, middles, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e30, -1e30])])
    besides = [torch.nextafter(on, torch.full_like(on, way)) for way in (torch.inf, -torch.inf)]
    values = torch.cat([values, torch.linspace(-size, size, 100_001), on, *besides])
    expected = torch.bucketize(values, middles, right=True)
    table = level_table(tuple(TABLES[name]), values.device)
    assert table.codes(values).tolist() == expected.tolist()
    assert torch.equal(table.nearest(values), levels[expected])
    shaped = values[:60].view(3, 20)[:, ::2]
    assert table.codes(shaped).shape == table.nearest(shaped).shape == (3, 10)
    assert torch.equal(table.codes(shaped), expected[:60].view(3, 20)[:, ::2].to(torch.uint8))


def test_levels_that_no_table_tells_apart_are_refused():
    with pytest.raises(ValueError, match="too near"):
        level_table((0.0, 1e-6, 2e-6, 1.0), torch.device("cpu"))
