"""Cosines between states, against float64."""

import numpy as np
import torch

from llmcompress.stats.similarity import Cosines, cosines


def states(seed, dtype=torch.float32):
    return torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_mean_is_that_of_float64_and_parts_add_up():
    for dtype in (torch.float32, torch.bfloat16):
        before, after = states(0, dtype), states(1, dtype)
        x, y = (np.asarray(item.double()).reshape(-1, 16) for item in (before, after))
        wanted = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
        whole = cosines(before, after)
        np.testing.assert_allclose(whole.mean, wanted.mean(), rtol=1e-5)
        parts = cosines(before[:1], after[:1]).plus(cosines(before[1:], after[1:]))
        assert parts.tokens == whole.tokens == 15
        np.testing.assert_allclose(parts.sum, whole.sum, rtol=1e-6)


def test_what_is_only_longer_is_the_same_and_nothing_is_nothing():
    np.testing.assert_allclose(cosines(states(2), 7 * states(2)).mean, 1, rtol=1e-6)
    assert Cosines(0.0, 0).mean == 0
