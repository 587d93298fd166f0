"""What few tokens say of how channels go together is trusted less, and kept weights serve other text better."""

import pytest
import torch

from llmcompress.methods.base import Statistics
from llmcompress.pruners.sparsegpt import SparseGpt
from llmcompress.stats.gram import Gram
from llmcompress.workers import SERIAL

WIDTH = 96

HALF = SparseGpt(sparsity=0.5)
NOT_REFITTED = SparseGpt(sparsity=0.5, refit=0)
PATTERN = SparseGpt(pattern="2:4")


@pytest.mark.parametrize(
    ("pruner", "tokens", "most"),
    [
        (HALF, 40, 0.3),
        (NOT_REFITTED, 40, 0.3),
        (PATTERN, 40, 0.6),
        (HALF, 192, 0.8),
        (NOT_REFITTED, 192, 0.8),
        (PATTERN, 192, 1.1),  # what is given up for other kinds of text, where masks have little choice
        (HALF, 2000, 0.95),
        (PATTERN, 2000, 1.1),
    ],
)
def test_kept_weights_lose_less_on_other_text_of_the_kind(pruner, tokens, most):
    """The expected loss, by the covariance that the tokens were drawn with, beside that without shrinkage."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.eye(WIDTH) + torch.randn(WIDTH, WIDTH, generator=generator) * WIDTH**-0.5
    rows = torch.randn(tokens, WIDTH, generator=generator) @ mixing
    weight, truth = torch.randn(64, WIDTH, generator=generator), (mixing.T @ mixing).double()
    lost = []
    for shrinkage in (None, 0.0):
        gram = Gram(WIDTH, SERIAL)
        gram.update(rows)
        asked = pruner.model_copy(update={"shrinkage": shrinkage})
        (found,) = asked.prune([weight], Statistics({"gram": gram}), SERIAL)
        missed = (weight - found.weight).double()
        lost.append(float(((missed @ truth) * missed).sum()))
    assert lost[0] < most * lost[1]
