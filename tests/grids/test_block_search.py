"""Searches for block types lose to llama-quantize nowhere, and the thorough one to the quick one in no block."""

import pytest
import torch
from blockdata import awkward, gaussian, importance, student

from llmcompress.grids import compat
from llmcompress.grids.blocks import BLOCK_TYPES
from llmcompress.grids.search import best, fast
from llmcompress.packing.ggml import pack, unpack
from llmcompress.workers import SERIAL

ALL = pytest.mark.parametrize("spec", BLOCK_TYPES.values(), ids=BLOCK_TYPES)
WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
DATA = {"gaussian": gaussian(32, 1024), "student5": student(32, 1024, 5), "student3": student(32, 1024, 3)}
BY_ROW = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@pytest.fixture(autouse=True)
def _one_thread():
    """As in a run: torch's own threads are off."""
    with SERIAL.with_threads(1):
        yield


def blocks_of(values, size):
    return values.double().reshape(-1, size)


def magnitude(weight, spec, weigh):
    """What the quick search weighs errors by, in float64 and as blocks; softened magnitudes for types with minima."""
    x = weight.double()
    if weigh is None and spec.curved:
        return blocks_of(torch.ones_like(x), spec.block_size)
    if weigh is None:
        squares = x.square().view(len(x), -1, spec.group_size)
        soft = squares.mean(-1, keepdim=True).sqrt().expand_as(squares).reshape(x.shape) + x.abs()
        return blocks_of(soft if spec.minima or spec.name in (*BY_ROW, "Q3_K") else x.square(), spec.block_size)
    if spec.name == "Q6_K":
        return blocks_of(weigh.expand_as(x), spec.block_size)
    span = x.shape[1] if spec.name in BY_ROW else spec.block_size
    energy = x.square().view(len(x), -1, span).mean(-1, keepdim=True).expand(-1, -1, span).reshape(x.shape)
    factor = 1 if spec.name in (*BY_ROW, "Q2_K") else 2
    return blocks_of(weigh.double() * (factor * energy + x.square()).sqrt(), spec.block_size)


def losses(coded, weight, weights, size):
    return ((blocks_of(coded.decode(), size) - blocks_of(weight, size)).square() * weights).sum(1)


@ALL
@WEIGHTED
def test_the_quick_search_is_no_worse_than_llama_quantize(spec, weighted):
    weigh = importance(1024) if weighted else None
    for name, weight in DATA.items():
        weights = magnitude(weight, spec, weigh)
        theirs = losses(compat.encode(weight, spec, SERIAL, weigh), weight, weights, spec.block_size).sum()
        ours = losses(fast(weight, spec, SERIAL, weigh), weight, weights, spec.block_size).sum()
        assert ours <= 1.001 * theirs, name


@ALL
@WEIGHTED
def test_the_thorough_search_loses_in_no_block(spec, weighted):
    weigh = importance(1024) if weighted else None
    weight = DATA["student5"]
    weights = blocks_of((torch.ones(1024) if weigh is None else weigh).expand_as(weight), spec.block_size)
    quick = losses(fast(weight, spec, SERIAL, weigh), weight, weights, spec.block_size)
    thorough = losses(best(weight, spec, SERIAL, weigh), weight, weights, spec.block_size)
    theirs = losses(compat.encode(weight, spec, SERIAL, weigh), weight, weights, spec.block_size)
    assert torch.all(thorough <= quick * (1 + 1e-4) + 1e-12)
    assert (thorough > theirs * (1 + 1e-4)).double().mean() < 0.1
    assert thorough.sum() < 0.96 * theirs.sum()


@pytest.mark.parametrize(
    ("name", "percent"),
    [("Q2_K", 26.0), ("Q3_K", 14.45), ("Q4_K", 6.98), ("Q5_K", 3.42), ("Q6_K", 1.67), ("Q4_0", 8.15), ("IQ4_XS", 7.45)],
)
def test_errors_on_gaussian_weights(name, percent):
    weight = gaussian(64, 1024, seed=3)
    off = best(weight, BLOCK_TYPES[name], SERIAL).decode() - weight
    assert 100 * off.norm() / weight.norm() < percent


def test_one_scale_per_block_is_close_to_the_best_of_all():
    spec, weight = BLOCK_TYPES["Q4_0"], gaussian(64, 32)
    found = (best(weight, spec, SERIAL).decode() - weight).double().square().sum(1)
    largest = weight.abs().amax(1, keepdim=True)
    optimum = torch.full_like(found, torch.inf)
    for step in torch.linspace(-1.6, 1.6, 4001):  # every scale worth a thought, in steps of 0.1 % of the largest
        scale = (step * largest / 8).half().float()
        codes = (weight / torch.where(scale == 0, 1e-6, scale)).round().clamp(-8, 7)
        optimum = torch.minimum(optimum, (codes * scale - weight).double().square().sum(1))
    assert found.sum() < 1.005 * optimum.sum()
    assert torch.all(found < 1.15 * optimum)


@ALL
@pytest.mark.parametrize("search", [fast, best])
def test_weights_on_the_grid_already_come_back(spec, search):
    """As llama-quantize stores them; a rounded scale of a scale may move them, but hardly."""
    weight = compat.encode(gaussian(16, 512, seed=7), spec, SERIAL).decode()
    off = search(weight, spec, SERIAL).decode() - weight
    ours = off.norm() / weight.norm()
    theirs = (compat.encode(weight, spec, SERIAL).decode() - weight).norm() / weight.norm()
    assert ours <= theirs + 1e-3


@ALL
@WEIGHTED
@pytest.mark.parametrize("search", [fast, best])
def test_awkward_rows_stay_finite_and_close(spec, weighted, search):
    rows = awkward()
    coded = search(torch.stack(list(rows.values())), spec, SERIAL, importance(512) if weighted else None)
    values = coded.decode()
    assert torch.isfinite(values).all()
    assert torch.equal(unpack(pack(coded), spec).decode(), values)
    for (name, row), value in zip(rows.items(), values, strict=True):
        if name.endswith(("zeros", "negative zeros", "subnormal floats")) and "groups" not in name:
            assert (value == 0).all(), name
        elif row.abs().max() < 1e3:
            assert (value - row).abs().max() <= 0.6 * row.abs().max() + 1e-5, name


@ALL
@pytest.mark.parametrize("search", [fast, best])
def test_channels_without_importance_keep_sensible_values(spec, search):
    weight, weigh = gaussian(8, 512), importance(512)
    weigh[:256] = 0
    weigh[300:310] = 0
    coded = search(weight, spec, SERIAL, weigh)
    off = (coded.decode() - weight)[:, :256].norm() / weight[:, :256].norm()
    assert off < 0.4
    assert torch.equal(
        pack(search(weight, spec, SERIAL, torch.zeros(512))), pack(search(weight, spec, SERIAL, torch.ones(512)))
    )


@ALL
@pytest.mark.parametrize("search", [fast, best])
def test_results_depend_neither_on_threads_nor_on_the_unit_of_importance(spec, search):
    weight, weigh = student(80, 1024, 5), importance(1024)
    alone = pack(search(weight, spec, SERIAL, weigh))
    with SERIAL.with_threads(2) as workers:
        assert torch.equal(pack(search(weight, spec, workers, weigh)), alone)
    assert torch.equal(pack(search(weight, spec, SERIAL, weigh * 2.0**40)), alone)


@ALL
def test_rows_of_one_block_and_no_rows(spec):
    weight = gaussian(3, spec.block_size)
    for search in (fast, best):
        assert search(weight, spec, SERIAL).codes.shape == weight.shape
        assert search(weight[:0], spec, SERIAL).decode().shape == (0, spec.block_size)
