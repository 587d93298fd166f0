"""Rows of int8, with and without outlier channels beside them."""

import torch

from llmcompress.grids.coded import Coded
from llmcompress.grids.grid_type import restored
from llmcompress.grids.int8 import Int8Spec, fit

WEIGHT = torch.randn(10, 40, generator=torch.Generator().manual_seed(0)) * 0.1


def test_minmax_takes_every_weight_to_within_half_a_step():
    grid = fit(WEIGHT, clip="minmax")
    far = (grid.decode(grid.encode(WEIGHT)) - WEIGHT).abs()
    assert (far <= WEIGHT.abs().amax(dim=1, keepdim=True) / 254 * 1.0001).all()
    assert int(grid.encode(WEIGHT).min()) >= 1


def test_a_search_never_loses_to_minmax():
    importance = torch.rand(40, generator=torch.Generator().manual_seed(1)) ** 6
    heavy = WEIGHT.clone()
    heavy[:, 0] *= 40
    importance[0] = 0

    def lost(grid):
        return ((grid.decode(grid.encode(heavy)) - heavy).square() @ importance).sum()

    assert lost(fit(heavy, importance=importance)) < lost(fit(heavy, clip="minmax"))


def test_outliers_neither_widen_a_row_nor_leave_codes():
    weight = WEIGHT.clone()
    weight[:, [3, 17]] *= 50
    rest = [column for column in range(40) if column not in (3, 17)]
    inner = fit(weight[:, rest], clip="minmax")
    index = torch.tensor([3, 17, -1])
    coded = inner.beside_outliers(inner.encode(weight[:, rest]), index, weight[:, [3, 17]], 40)
    codes, grid = coded.codes, coded.grid
    assert grid.spec == Int8Spec(3)
    assert torch.equal(grid.absmax[:, 0], WEIGHT[:, rest].abs().amax(dim=1))
    value = grid.decode(codes)
    assert torch.equal(value[:, [3, 17]], weight[:, [3, 17]].half().float())
    assert (codes[:, [3, 17]] == 128).all()
    assert torch.equal(grid.encode(weight), codes)
    assert torch.equal(restored(grid.spec, coded.stored()).decode(), value)
    assert torch.equal(Coded.stacked([coded.rows(slice(0, 4)), coded.rows(slice(4, 10))]).decode(), value)


def test_a_row_of_zeros_stays_one():
    grid = fit(torch.zeros(2, 8))
    assert torch.equal(grid.decode(grid.encode(torch.zeros(2, 8))), torch.zeros(2, 8))
