"""Correlations count for less the fewer tokens they were seen on, and codes are better on text of the same kind."""

import pytest
import torch

from llmcompress.methods.base import Statistics
from llmcompress.methods.gptq import Gptq
from llmcompress.solve.damping import inverse_factor, permuted
from llmcompress.solve.prepared import column_order
from llmcompress.solve.row_blocks import SERIAL_BLOCKS
from llmcompress.solve.shrinkage import chosen_shrinkage
from llmcompress.stats.gram import Gram
from llmcompress.workers import SERIAL

WIDTH, PERCDAMP = 96, 0.01


def mixing(strength):
    """Inputs are `strength` alike, and of unlike size."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.eye(WIDTH) + strength * torch.randn(WIDTH, WIDTH, generator=generator) * WIDTH**-0.5
    return mixed * torch.logspace(-1, 1, WIDTH)


def gram_of(tokens, strength=1.0, seed=1):
    gram = Gram(WIDTH, SERIAL)
    gram.update(torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed)) @ mixing(strength))
    return gram


def ordered(gram):
    hessian = gram.mean()
    return permuted(hessian, column_order(hessian, by_energy=True))


def costs(hessian, shrinkage):
    """By hand in float64: a column's coefficients from the inverse of what stands from it on, judged by H itself."""
    hessian = hessian.double()
    bent = hessian + torch.diag(shrinkage * hessian.diagonal() + PERCDAMP * hessian.diagonal().mean())
    found = []
    for column in range(len(hessian)):
        inverse = torch.linalg.inv(bent[column:, column:])[0]
        ahead = inverse / inverse[0]
        found.append(ahead @ hessian[column:, column:] @ ahead)
    return torch.stack(found)


@pytest.mark.parametrize("strength", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("tokens", [300, 1000, 5000])
def test_costs_on_the_text_rise_by_about_what_it_flatters(tokens, strength):
    hessian = ordered(gram_of(tokens, strength))
    share = chosen_shrinkage(hessian, PERCDAMP, tokens)
    rise = float(costs(hessian, share).sum() / costs(hessian, 0).sum()) - 1
    assert share == 1 or 0.5 < rise / (2 * WIDTH / tokens) < 1.5


@pytest.mark.parametrize(("tokens", "most"), [(20, 0.9), (96, 0.9), (400, 1 + WIDTH / 400)])
def test_codes_from_few_tokens_are_better_on_other_text_of_the_kind(tokens, most):
    """The expected loss, by the covariance that the tokens were drawn with."""
    gram, truth = gram_of(tokens), (mixing(1.0).T @ mixing(1.0)).double()
    weight = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2))
    lost = {}
    for shrinkage in (None, 0.0):
        method = Gptq(bits=3, group_size=32, shrinkage=shrinkage)
        solved = method.solve(weight, Statistics({"gram": gram}), torch.float16, SERIAL_BLOCKS)
        missed = weight.double() - solved.coded.decode()
        lost[shrinkage] = float(((missed @ truth) * missed).sum())
        assert solved.shrinkage == (chosen_shrinkage(ordered(gram), PERCDAMP, tokens) if shrinkage is None else 0)
    assert lost[None] < most * lost[0.0]


def test_many_tokens_are_trusted():
    hessian = ordered(gram_of(1000))
    assert chosen_shrinkage(hessian, PERCDAMP, 1_000_000) == 0
    assert chosen_shrinkage(hessian, PERCDAMP, 5000) < chosen_shrinkage(hessian, PERCDAMP, 1000)


def test_tokens_lent_by_others_count():
    gram = gram_of(10)
    gram.shrink_towards(gram_of(1000, seed=2).mean(), 500.0)
    assert (gram.tokens, gram.trusted) == (10, 510.0)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_energies_of_channels_do_not_matter(scale):
    hessian = ordered(gram_of(400))
    expected = chosen_shrinkage(hessian, PERCDAMP, 400)
    assert chosen_shrinkage(hessian * scale, PERCDAMP, 400) == pytest.approx(expected, rel=1e-3)


def test_a_channel_without_energy_and_a_matrix_of_one_token():
    gram = Gram(WIDTH, SERIAL)
    rows = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0))
    rows[:, 5] = 0
    gram.update(rows)
    share = chosen_shrinkage(ordered(gram), PERCDAMP, 1)
    assert 0 < share <= 1
    assert inverse_factor(ordered(gram), PERCDAMP, share).dead == 1
