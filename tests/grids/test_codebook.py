"""Codebooks against exact dynamic programming over every place of a row."""

import pytest
import torch

from llmcompress.errors import RecipeError
from llmcompress.grids.codebook import CodebookGrid, CodebookSpec, fit, k_means
from llmcompress.grids.coded import Coded
from llmcompress.grids.grid_type import restored


def least_error(row, mass, count):
    """The least weighted squared error of `count` centres for a row, in float64."""
    values, order = row.double().sort()
    mass = mass.double()[order]
    sums = [torch.nn.functional.pad(part.cumsum(0), (1, 0)) for part in (mass, mass * values, mass * values**2)]
    weight, first, second = (part[None] - part[:, None] for part in sums)
    cost = (second - first**2 / weight.clamp_min(1e-300)).clamp_min(0)
    cost[torch.ones_like(cost).tril(-1).bool()] = torch.inf
    least = cost[0]
    for _ in range(count - 1):
        least = (least[:, None] + cost).amin(dim=0)
    return float(least[-1])


def lost(weight, mass, centres):
    spec = CodebookSpec(centres.shape[1].bit_length() - 1)
    grid = CodebookGrid(spec, weight.shape[1], centres)
    return ((grid.decode(grid.encode(weight.double())) - weight.double()) ** 2 * mass.double()).sum(dim=1)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("width", [20, 300])
def test_k_means_is_exact_for_short_rows_and_nearly_so_for_long_ones(bits, width):
    g = torch.Generator().manual_seed(bits)
    weight = torch.randn(6, width, generator=g)
    weight[:, :3] *= 5
    mass = torch.rand(width, generator=g) ** 4 + 1e-3  # as uneven as Gram diagonals: Lloyd alone loses 10% and more
    found = lost(weight, mass, k_means(weight, mass, 1 << bits))
    best = torch.tensor([least_error(row, mass, 1 << bits) for row in weight], dtype=torch.float64)
    assert (found >= best * (1 - 1e-9)).all()
    assert (found <= best * (1 + 1e-5 if width < 128 else 1.03)).all()
    assert float(found.sum()) <= 1.01 * float(best.sum())


def test_rows_of_few_values_are_kept_exactly():
    weight = torch.tensor([[0.5, -0.25, 0.5, 2.0] * 8, [0.0] * 32])
    grid = fit(weight, CodebookSpec(2))
    assert torch.equal(grid.decode(grid.encode(weight)), weight)


def test_values_ascend_and_are_float16_and_parts_come_back():
    weight = torch.randn(9, 50, generator=torch.Generator().manual_seed(2))
    grid = fit(weight, CodebookSpec(3))
    assert (grid.values.diff(dim=1) >= 0).all()
    assert torch.equal(grid.values.half().float(), grid.values)
    coded = Coded(grid.encode(weight), grid)
    assert torch.equal(restored(grid.spec, coded.stored()).decode(), coded.decode())
    assert torch.equal(Coded.stacked([coded.rows(slice(0, 4)), coded.rows(slice(4, 9))]).decode(), coded.decode())


def test_other_widths_are_refused():
    with pytest.raises(RecipeError, match="codebooks have 2, 3, 4 bits, not 8"):
        CodebookSpec(8)
