"""Maxima and counts of magnitudes against numpy."""

import numpy as np
import torch

from llmcompress.stats.absmax import AbsMax
from llmcompress.stats.magnitudes import Magnitudes


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 5, 6, generator=generator) for _ in range(3)]


def test_maxima_are_those_of_all_tokens_but_the_first_of_windows():
    seen = AbsMax(6)
    for x in batches():
        seen.update(x)
    later = torch.cat([x[:, 1:].reshape(-1, 6) for x in batches()])
    assert torch.equal(seen.channels, later.abs().amax(0))
    assert seen.peak == float(later.abs().max())
    assert (seen.tokens, seen.dropped) == (24, 0)


def test_loose_tokens_all_count():
    seen, x = AbsMax(6), batches()[0][0]
    seen.update(x)
    assert torch.equal(seen.channels, x.abs().amax(0))


def test_rows_that_are_not_finite_are_left_out_and_counted():
    x = batches()[0]
    x[1, 3, 2], x[0, 2, 0] = float("nan"), float("-inf")
    good = x[:, 1:].reshape(-1, 6)[[0, 2, 3, 4, 5, 7]]
    most, counts = AbsMax(6), Magnitudes()
    most.update(x)
    counts.update(x)
    assert torch.equal(most.channels, good.abs().amax(0))
    assert (most.tokens, most.dropped) == (counts.tokens, counts.dropped) == (6, 2)
    assert int(counts.counts.sum()) == good.numel()


def test_magnitudes_are_counted_one_by_one_and_merge():
    one, other = Magnitudes(), Magnitudes()
    parts = [x.bfloat16() for x in batches()]
    one.update(parts[0])
    other.update(parts[1])
    other.update(parts[2])
    one.merge(other)
    every = torch.cat([x[:, 1:].reshape(-1) for x in parts]).float().abs().numpy()
    values, counts = np.unique(every, return_counts=True)
    found = one.present()
    assert np.array_equal(found[0].numpy(), values)
    assert np.array_equal(found[1].numpy(), counts)
    assert one.tokens == 24
