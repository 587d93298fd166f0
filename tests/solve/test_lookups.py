"""A head that is the embedding as well: the Gram matrix of its inputs, and a share of the identity."""

import pytest
import torch

from llmcompress.solve.lookups import with_lookups
from llmcompress.stats.gram import Gram


def test_rows_that_are_looked_up_weigh_as_the_geometric_mean_of_the_eigenvalues():
    inputs = torch.randn(400, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = inputs @ torch.diag(torch.linspace(0.1, 4, 24, dtype=torch.float64))
    mean = inputs.T @ inputs / 400
    both = with_lookups(Gram.of(mean.to(torch.float32), 400))
    damped = mean + 0.01 * mean.diagonal().mean() * torch.eye(24, dtype=torch.float64)
    level = torch.linalg.eigvalsh(damped).log().mean().exp()
    assert both.tokens == 400
    expected = mean + level * torch.eye(24, dtype=torch.float64)
    torch.testing.assert_close(both.finish().to(torch.float64), expected, rtol=1e-5, atol=1e-6)
    assert float(level) < 0.7 * float(mean.diagonal().mean())  # less than an equal trace


def test_the_statistics_of_the_head_alone_stay_as_they_are():
    mean = torch.eye(8) * 2
    gram = Gram.of(mean, 10)
    with_lookups(gram)
    assert float(gram.mean().diagonal().sum()) == pytest.approx(16)
