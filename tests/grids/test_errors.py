"""Errors of outputs by blocks of the Gram matrix: those of the tokens, and least where ranges are searched by them.

The oracle is float64 on the tokens themselves: codes by numpy, outputs by products, candidates by brute force.
"""

import numpy as np
import pytest
import torch

from llmcompress.grids.errors import UNKNOWN, Errors
from llmcompress.grids.integer import IntegerSpec, fit

GROUP, WIDTH, ROWS = 16, 48, 12
SPECS = [IntegerSpec(bits, group, sym) for bits in (2, 3, 4) for group in (GROUP, -1) for sym in (True, False)]


def tokens(seed=0, count=400):
    """Inputs [tokens, in] with correlated channels, one that is loud and one that is never active."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, WIDTH, generator=generator) @ torch.randn(WIDTH, WIDTH, generator=generator)
    mixed[:, 5] *= 6
    mixed[:, 9] = 0
    return mixed


def weights(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator) * 0.05


def gram(x):
    return x.T @ x / len(x)


@pytest.mark.parametrize("rows", [1, 5])
def test_errors_of_outputs_are_those_of_the_tokens(rows):
    x, delta = tokens(), torch.randn(rows, WIDTH // GROUP, GROUP, generator=torch.Generator().manual_seed(2))
    found = Errors.of(weights(), GROUP, "output", None, gram(x)).squared(delta.clone())
    parts = x.double().view(-1, WIDTH // GROUP, GROUP)
    outputs = torch.einsum("tgk,rgk->trg", parts, delta.double())
    unseen = UNKNOWN * x.double().square().mean() * delta.double().square().sum(-1)
    assert torch.allclose(found.double(), outputs.square().mean(0) + unseen, rtol=1e-4)


@pytest.mark.parametrize("kind", ["search", "output"])
def test_the_quotient_of_products_is_the_least_squares_scale(kind):
    x, levels = tokens(), torch.randint(-8, 8, (4, 3, GROUP), generator=torch.Generator().manual_seed(3)).float()
    block = 0.02 * levels + weights()[:4].reshape(4, 3, GROUP)
    errors = Errors.of(weights(), GROUP, kind, gram(x).diagonal(), gram(x))
    linear, square = errors.products(levels, block)
    best = (linear / square).unsqueeze(-1)
    least = errors.squared(levels * best - block)
    for factor in (0.99, 1.01):
        assert (errors.squared(levels * best * factor - block) > least).all()


class Oracle:
    """One matrix in float64, group by group: what a scale and a zero point lose on the tokens."""

    def __init__(self, w, x, spec):
        self.levels, self.group = spec.levels, spec.width(WIDTH)
        self.w = w.double().numpy().reshape(ROWS, -1, self.group)
        self.x = x.double().numpy()
        self.unseen = UNKNOWN * np.square(self.x).mean()

    def loss(self, row, group, scale, zero):
        w = self.w[row, group]
        delta = (np.clip(np.rint(w / scale + zero), 0, self.levels - 1) - zero) * scale - w
        seen = self.x[:, group * self.group : (group + 1) * self.group] @ delta
        return np.square(seen).mean() + self.unseen * np.square(delta).sum()

    def groups(self):
        return [(row, group) for row in range(ROWS) for group in range(WIDTH // self.group)]


def shrunk(w, share, spec):
    """Scale and zero point of the range of w, shrunk to a share: float16, as they are stored."""
    if spec.symmetric:
        extreme = w[np.abs(w).argmax()]
        return np.float64(np.float16(-extreme * share / spec.middle)), spec.middle
    low, high = min(w.min(), 0) * share, max(w.max(), 0) * share
    scale = np.float64(np.float16((high - low) / (spec.levels - 1)))
    return scale, np.clip(np.rint(-low / scale), 0, spec.levels - 1)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_no_range_that_clips_less_or_more_loses_less_at_the_output(spec):
    w, x = weights(), tokens()
    oracle, grid = Oracle(w, x, spec), fit(w, spec, clip="output", gram=gram(x))
    shares = {2: (1, 0.65, 0.3), 3: (1, 0.725, 0.45), 4: (1, 0.8, 0.6)}[spec.bits]  # ends and middle of the search
    for row, group in oracle.groups():
        found = oracle.loss(row, group, float(grid.scale[row, group]), float(grid.zero[row, group]))
        for share in shares:
            assert found <= oracle.loss(row, group, *shrunk(oracle.w[row, group], share, spec)) * (1 + 1e-3)


@pytest.mark.parametrize("spec", [IntegerSpec(3, GROUP), IntegerSpec(3, GROUP, False)], ids=lambda spec: spec.name)
def test_the_search_comes_near_the_best_of_all_scales_and_zero_points(spec):
    w, x = weights(), tokens()
    oracle, grid = Oracle(w, x, spec), fit(w, spec, clip="output", gram=gram(x))
    blind = fit(w, spec, clip="minmax")
    found, best, covering = 0.0, 0.0, 0.0
    for row, group in oracle.groups():
        reach = np.abs(oracle.w[row, group]).max() / spec.middle
        scales = np.concatenate([reach * np.linspace(0.3, 2, 120), -reach * np.linspace(0.3, 2, 120)])
        zeros = [spec.middle] if spec.symmetric else range(spec.levels)
        best += min(oracle.loss(row, group, scale, zero) for scale in scales for zero in zeros)
        found += oracle.loss(row, group, float(grid.scale[row, group]), float(grid.zero[row, group]))
        covering += oracle.loss(row, group, float(blind.scale[row, group]), float(blind.zero[row, group]))
    assert found - best < 0.2 * (covering - best)


def test_groups_in_another_order_go_by_their_own_blocks():
    w, x, order = weights(), tokens(), torch.randperm(WIDTH, generator=torch.Generator().manual_seed(2))
    grid = fit(w, IntegerSpec(3, GROUP), clip="output", gram=gram(x), order=order)
    moved = fit(w[:, order], IntegerSpec(3, GROUP), clip="output", gram=gram(x[:, order]))
    assert torch.equal(grid.scale, moved.scale)
    assert grid.group_index[order].tolist() == [k // GROUP for k in range(WIDTH)]


def test_inputs_that_were_never_active_leave_the_plain_search():
    w = weights()
    blind = fit(w, IntegerSpec(4, GROUP), clip="output", gram=torch.zeros(WIDTH, WIDTH))
    assert torch.equal(blind.scale, fit(w, IntegerSpec(4, GROUP)).scale)


def test_outputs_are_not_judged_without_inputs():
    with pytest.raises(TypeError, match="Gram matrix"):
        fit(weights(), IntegerSpec(4, GROUP), clip="output")
