"""GPTQ on NF4, codebooks and int8: the same sweep and descent, whatever the grid; outliers by brute force."""

import pytest
import torch

from llmcompress.errors import RunError
from llmcompress.grids import codebook, int8
from llmcompress.grids.codebook import CodebookSpec
from llmcompress.grids.coded import Coded
from llmcompress.grids.int8 import outlier_channels
from llmcompress.methods.base import Statistics
from llmcompress.methods.gptq import Gptq
from llmcompress.methods.rtn import Rtn
from llmcompress.solve.damping import damped, inverse_factor
from llmcompress.solve.gptq import gptq_codes
from llmcompress.solve.outliers import remaining, with_outliers
from llmcompress.solve.refine import Refiner, row_loss
from llmcompress.solve.row_blocks import SERIAL_BLOCKS
from llmcompress.stats.absmax import AbsMax
from llmcompress.stats.gram import Gram
from llmcompress.workers import SERIAL

OPTIONS = [
    {"type": "nf4"},
    {"type": "nf4", "double_quant": False},
    {"type": "codebook", "bits": 3},
    {"type": "codebook", "bits": 4},
    {"type": "int8", "bits": 8},
    {"type": "int8", "bits": 8, "outliers": "topk", "outlier_count": 3},
]


def problem(rows=24, width=128, tokens=2000, seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=g) * 0.1
    x = torch.randn(tokens, width, generator=g) @ (torch.randn(width, width, generator=g) * 0.1 + torch.eye(width))
    x[:, :3] *= 10
    gram = Gram(width, SERIAL)
    gram.update(x)
    peaks = AbsMax(width)
    peaks.update(x)
    return weight, Statistics({"gram": gram, "peaks": peaks})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gptq_beats_rounding_by_far_and_descent_helps(options):
    weight, stats = problem()
    hessian = stats.gram.finish()

    def lost(method):
        return float(row_loss(weight, method.solve(weight, stats, torch.float16, SERIAL_BLOCKS).coded, hessian).sum())

    swept = lost(Gptq(**options, descent=0))
    assert swept < 0.7 * lost(Rtn(**options))
    assert lost(Gptq(**options)) < swept


def test_the_sweep_on_a_codebook_is_the_plain_algorithm():
    weight, stats = problem(rows=4, width=24)
    hessian = stats.gram.finish()
    grid = codebook.fit(weight, CodebookSpec(3), hessian.diagonal())
    coded = gptq_codes(weight, grid, inverse_factor(hessian, 0.01), torch.arange(24))
    upper = torch.linalg.cholesky(torch.linalg.inv(damped(hessian.double(), 0.01)), upper=True)
    work = weight.double().clone()
    for j in range(24):
        code = (work[:, j, None] - grid.values.double()).abs().argmin(dim=1)
        assert torch.equal(code, coded.codes[:, j].long())
        error = (work[:, j] - grid.values.double().gather(1, code[:, None])[:, 0]) / upper[j, j]
        work[:, j:] -= error[:, None] * upper[j, j:]


def test_tables_are_refitted_by_least_squares():
    weight, stats = problem(rows=6, width=40)
    hessian = damped(stats.gram.finish(), 0.01)
    grid = codebook.fit(weight, CodebookSpec(2))
    codes = grid.encode(weight)
    coded = grid.refit(codes, hessian, (weight - grid.decode(codes)) @ hessian, torch.float16)
    for row in range(6):
        basis = torch.nn.functional.one_hot(codes[row].long(), 4).double()
        table = torch.linalg.solve(
            basis.T @ hessian.double() @ basis, basis.T @ (hessian.double() @ weight[row].double())
        )
        assert torch.allclose(coded.decode()[row].double(), basis @ table, atol=2e-3)
    assert (row_loss(weight, coded, hessian) <= row_loss(weight, Coded(codes, grid), hessian)).all()
    assert (coded.grid.values.diff(dim=1) >= 0).all()


@pytest.mark.parametrize("bits", [2, 4])
def test_no_round_of_descent_raises_the_loss_of_a_row_of_a_codebook(bits):
    weight, stats = problem()
    hessian = damped(stats.gram.finish(), 0.01)
    grid = codebook.fit(weight, CodebookSpec(bits))
    before = Coded(grid.encode(weight), grid)
    after = Refiner(hessian, torch.arange(128)).refine(weight, before, torch.float16, 2)
    assert (row_loss(weight, after, hessian) <= row_loss(weight, before, hessian) * (1 + 1e-5)).all()


def test_outliers_are_the_largest_that_reach_the_threshold():
    absmax = torch.tensor([1.0, 9.0, 3.0, 9.0, 7.0])
    assert outlier_channels(absmax, 2).tolist() == [1, 3]
    assert outlier_channels(absmax, 3).tolist() == [1, 3, 4]
    assert outlier_channels(absmax, 4, 8.0).tolist() == [1, 3, -1, -1]
    assert outlier_channels(absmax, 2, 10.0).tolist() == [-1, -1]
    assert remaining(torch.tensor([1, 3, -1]), 5).tolist() == [0, 2, 4]


def test_outliers_take_up_the_error_of_the_rest_as_well_as_they_can():
    weight, stats = problem(rows=5, width=32)
    hessian = stats.gram.finish()
    index = torch.tensor([0, 2, -1])
    rest = remaining(index, 32)
    grid = int8.fit(weight[:, rest] * 1.0, clip="minmax")
    coded = Coded(grid.encode(weight[:, rest]) // 16 * 16, grid)  # a coarse one
    taken = with_outliers(coded, weight, index, hessian)
    assert float(row_loss(weight, taken, hessian).sum()) < float(
        row_loss(weight, with_outliers(coded, weight, index), hessian).sum()
    )
    for column, place in ((0, 0), (1, 2)):  # a step either way in a single weight is worse
        for step in (-0.05, 0.05):
            outliers = taken.grid.outliers.clone()
            outliers[:, column] += step
            moved = Coded(taken.codes, int8.Int8Grid(taken.grid.spec, 32, taken.grid.absmax, index, outliers))
            assert (row_loss(weight, moved, hessian) > row_loss(weight, taken, hessian)).all(), place


def test_outliers_need_statistics_and_crowded_ones_are_counted():
    weight, stats = problem()
    options = {"type": "int8", "bits": 8, "outliers": "threshold", "outlier_count": 2}
    with pytest.raises(RunError, match="statistics"):
        Rtn(**options).solve(weight, Statistics(), torch.float16, SERIAL_BLOCKS)
    assert (
        Rtn(**options).solve(weight, stats, torch.float16, SERIAL_BLOCKS).crowded_outliers
        == int((stats.peaks.channels >= 6).sum()) - 2
    )
