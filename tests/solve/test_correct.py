"""Asymmetric calibration against least squares in float64, and the drift against its definition."""

import pytest
import torch

from llmcompress.errors import RunError
from llmcompress.methods.base import Statistics
from llmcompress.methods.gptq import Gptq
from llmcompress.solve import damping
from llmcompress.solve.correct import corrected
from llmcompress.solve.row_blocks import SERIAL_BLOCKS
from llmcompress.stats.drift import Drift
from llmcompress.stats.gram import Gram
from llmcompress.workers import SERIAL, Workers


def streams(tokens=600, width=32, seed=0):
    """Inputs in the uncompressed model, and as they arrive after errors in the layers before."""
    generator = torch.Generator().manual_seed(seed)
    original = torch.randn(tokens, width, generator=generator) @ torch.randn(width, width, generator=generator)
    # earlier errors are partly a function of the input, as those of a quantised layer are
    bent = torch.eye(width) + 0.15 * torch.randn(width, width, generator=generator)
    return original, original @ bent + 0.2 * torch.randn(tokens, width, generator=generator)


def statistics(original, here):
    gram, drift = Gram(here.shape[1], SERIAL), Drift(here.shape[1], SERIAL)
    for x, y in zip(original.split(100), here.split(100), strict=True):
        gram.update(y)
        drift.update(x, y)
    return Statistics({"gram": gram, "drift": drift})


def test_drift_is_the_mean_of_its_definition_and_leaves_out_what_is_not_finite():
    original, here = streams()
    drift = statistics(original, here).drift
    expected = ((original - here).double().T @ here.double()) / len(here)
    assert torch.allclose(drift.mean().double(), expected, rtol=1e-4, atol=1e-4 * expected.abs().max())
    before = drift.sum.clone()
    drift.update(torch.full((2, 32), float("inf")), torch.ones(2, 32))
    assert torch.equal(drift.sum, before)
    assert drift.tokens == len(here)


def test_no_drift_changes_nothing():
    _, here = streams()
    weight = torch.randn(8, 32)
    stats = statistics(here, here)
    assert torch.equal(corrected(weight, stats.gram.mean(), stats.drift.mean(), 1.0), weight)


@pytest.mark.parametrize("rows", [8, 48])  # fewer and more than there are inputs
@pytest.mark.parametrize("alpha", [0.25, 0.5, 1.0])
def test_the_corrected_weight_is_nearer_to_the_uncompressed_outputs(alpha, rows):
    original, here = streams()
    weight = torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))
    stats = statistics(original, here)
    moved = corrected(weight, stats.gram.mean(), stats.drift.mean(), alpha)
    goal = original @ weight.T

    def loss(w):
        return float((here @ w.T - goal).square().mean())

    best = torch.linalg.lstsq(here.double(), goal.double()).solution.T.float()
    assert loss(best) < loss(moved) < loss(weight)
    if alpha == 1.0:
        assert loss(moved) < 0.7 * loss(weight)


@pytest.mark.parametrize("rows", [7, 310])
def test_parts_on_any_number_of_threads_make_the_correction_of_float64(monkeypatch, rows):
    monkeypatch.setattr(damping, "WHOLE", 160)
    original, here = streams(tokens=1200, width=300)
    weight = torch.randn(rows, 300, generator=torch.Generator().manual_seed(1))
    stats = statistics(original, here)
    hessian, drift = stats.gram.mean(), stats.drift.mean()
    expected = weight.double() @ drift.double() @ torch.linalg.inv(damping.damped(hessian.double(), 1.0))
    alone = corrected(weight, hessian, drift, 1.0)
    torch.testing.assert_close(alone.double(), weight.double() + expected, rtol=1e-4, atol=1e-5)
    with Workers().with_threads(3) as workers:
        assert torch.equal(corrected(weight, hessian, drift, 1.0, workers), alone)


def test_a_gram_matrix_without_a_factor_is_refused_in_one_line():
    with pytest.raises(RunError, match="32 inputs is not positive definite"):
        corrected(torch.ones(4, 32), torch.full((32, 32), float("nan")), torch.ones(32, 32), 0.5)


@pytest.mark.parametrize("options", [{"group_size": 16}, {"group_size": 16, "clip": "output", "descent": 2}])
def test_a_gram_matrix_that_is_asked_for_once_gives_the_same_codes_and_is_as_it_was(options):
    weight, found = torch.randn(16, 32, generator=torch.Generator().manual_seed(2)) * 0.1, []
    for alone in (True, False):
        stats = statistics(*streams())
        before = stats.gram.mean().clone()
        if alone:
            stats.gram.expect_one()
        found.append(Gptq(**options).solve(weight, stats, torch.float16, SERIAL_BLOCKS).coded)
        assert torch.equal(stats.gram.mean(), before)
    assert torch.equal(found[0].codes, found[1].codes)


def test_gptq_with_drift_beats_gptq_without_on_the_uncompressed_outputs():
    original, here = streams()
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(2)) * 0.1
    stats = statistics(original, here)
    goal = original @ weight.T
    losses = {}
    for name, given in (("with", stats), ("without", Statistics({"gram": stats.gram}))):
        decoded = Gptq(bits=3, group_size=16).solve(weight, given, torch.float16, SERIAL_BLOCKS).coded.decode()
        losses[name] = float((here @ decoded.T - goal).square().mean())
    assert losses["with"] < 0.9 * losses["without"]
