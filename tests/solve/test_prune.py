"""Masks: exact counts, ties by position, patterns; all against brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcompress.solve.prune import Pattern, pruned_mask, smallest, smallest_of_each


def brute(row, drop):
    """Indices of the `drop` smallest, the earlier of equal ones first."""
    return set(sorted(range(len(row)), key=lambda k: (row[k], k))[:drop])


values = st.lists(st.integers(0, 5), min_size=1, max_size=40)


@given(values, st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_the_smallest_are_those_of_a_stable_sort(row, drop):
    drop = min(drop, len(row))
    mask = smallest(torch.tensor([row, row[::-1]], dtype=torch.float32), drop)
    assert set(np.flatnonzero(mask[0])) == brute(row, drop)
    assert set(np.flatnonzero(mask[1])) == brute(row[::-1], drop)


@given(
    st.lists(st.integers(0, 3), min_size=12, max_size=12), st.sampled_from([(1, 2), (2, 4), (1, 4), (4, 6), (5, 12)])
)
@settings(max_examples=200, deadline=None)
def test_each_run_loses_its_smallest(row, pattern):
    kept, of = pattern
    mask = smallest_of_each(torch.tensor(row, dtype=torch.float32).view(-1, of), Pattern(kept, of))
    for run, found in zip(np.array(row).reshape(-1, of), mask, strict=True):
        assert set(np.flatnonzero(found)) == brute(list(run), of - kept)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.77, 0.999])
def test_shares_are_exact_even_where_everything_is_equal(sparsity, whole):
    mask = pruned_mask(torch.zeros(7, 30), sparsity, None, whole)
    if whole:
        assert int(mask.sum()) == round(sparsity * 210)
    else:
        assert mask.sum(dim=1).tolist() == [round(sparsity * 30)] * 7


def test_a_pattern_counts_what_is_kept():
    mask = pruned_mask(torch.rand(5, 24, generator=torch.Generator().manual_seed(0)), 0.0, Pattern(1, 4), False)
    assert mask.view(5, 6, 4).sum(-1).unique().tolist() == [3]
