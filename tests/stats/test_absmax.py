"""Largest magnitudes of channels, against the plain maximum over all tokens at once."""

import pytest
import torch

from llmcompress.stats.absmax import AbsMax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_batches_give_the_maximum_over_all_tokens(dtype):
    x = torch.randn(5, 7, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = AbsMax(16)
    for batch in x:  # loose tokens
        seen.update(batch)
    assert torch.equal(seen.channels, x.abs().float().amax(dim=(0, 1)))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_tokens_that_are_not_finite_are_left_out_whole(bad):
    x = torch.tensor([[1.0, -2.0, 3.0], [9.0, bad, 9.0], [-4.0, 0.5, 0.0]])
    seen = AbsMax(3)
    seen.update(x)
    assert seen.channels.tolist() == [4.0, 2.0, 3.0]
    seen.update(torch.full((2, 3), bad))
    seen.update(torch.empty(0, 3))
    assert seen.channels.tolist() == [4.0, 2.0, 3.0]
