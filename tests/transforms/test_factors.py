"""The factors that transforms choose, against their papers' formulas in float64 and a search written down once more."""

import pytest
import torch

from llmcompress.grids.integer import IntegerSpec
from llmcompress.stats.inputs import Inputs
from llmcompress.transforms.awq import AwqScale
from llmcompress.transforms.base import WIDEST, Reader, Scalable, usable
from llmcompress.transforms.smoothquant import SmoothQuant
from llmcompress.workers import SERIAL

WIDTH, GROUP = 64, 16
SPEC = IntegerSpec(3, GROUP)


def site(seed=0, **about):
    """Two matrices that read correlated channels, a few of them large; the inputs themselves beside."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(300, WIDTH, generator=g) @ (torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH, generator=g))
    x[:, ::13] *= 12
    weights = [torch.randn(rows, WIDTH, generator=g) * 0.1 for rows in (24, 8)]
    inputs = Inputs(x.T @ x / len(x), x.abs().mean(dim=0), x.abs().amax(dim=0), x)
    return Scalable(inputs, tuple(Reader(w, SPEC) for w in weights), WIDTH, **about), x, weights


def centred(factors):
    """Factors times what makes their geometric middle 1."""
    return factors / (factors.max() * factors.min()).sqrt()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_smoothquant_is_equation_4(alpha):
    asked, x, weights = site()
    largest, weight = x.double().abs().amax(0), torch.cat(weights).double().abs().amax(0)
    found = SmoothQuant(alpha=alpha).factors(asked, SERIAL)
    assert torch.allclose(found.double(), centred(largest**alpha / weight ** (1 - alpha)), rtol=1e-5)


def test_channels_that_share_a_factor_go_by_the_largest_of_them():
    shared = torch.arange(WIDTH) // 4
    asked, x, weights = site()
    asked = Scalable(asked.inputs, asked.readers, WIDTH // 4, spread=shared)
    largest, weight = (value.double().abs().amax(0).view(-1, 4).amax(1) for value in (x, torch.cat(weights)))
    found = SmoothQuant(alpha=0.5).factors(asked, SERIAL)
    assert torch.allclose(found.double(), centred((largest / weight).sqrt()), rtol=1e-5)
    assert torch.equal(asked.spread_out(found), found.repeat_interleave(4))


def rounded(weight):
    """Rounding to nearest in float64: codes -4 ... 3 of 3 bits, the range as wide as the largest of a group."""
    groups = weight.double().view(len(weight), -1, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) * 2 / 7).to(torch.float16).double()
    return ((groups / scale).round().clamp(-4, 3) * scale).view(weight.shape)


def error_of_outputs(x, weights, factors):
    """Squared error of the outputs for a token, of rounding weights that are scaled up by the factors."""
    factors = factors.double()
    return sum(
        float((x.double() @ (rounded(w * factors) / factors - w.double()).T).square().sum()) / len(x) for w in weights
    )


@pytest.mark.parametrize("duo", ["never", "always", "both"])
def test_awq_finds_the_least_error_of_all_exponents(duo):
    asked, x, weights = site(1)
    mean = x.double().abs().mean(0)
    shares = torch.cat([
        (w.double().abs().view(len(w), -1, GROUP) / w.double().abs().view(len(w), -1, GROUP).amax(-1, True)).view(
            w.shape
        )
        for w in weights
    ]).mean(0)  # fmt: skip
    candidates = [torch.ones(WIDTH, dtype=torch.float64)]
    for step in range(11):
        ratio = step / 10
        candidates += [mean**ratio] * (duo != "always") + [mean**ratio / shares ** (1 - ratio)] * (duo != "never")
    errors = [error_of_outputs(x, weights, centred(candidate)) for candidate in candidates]
    found = AwqScale(steps=10, duo_scaling=duo).factors(asked, SERIAL)
    # near ties may fall either way: the formula of the authors adds 1e-4 to a divisor, and sums are in float32
    assert error_of_outputs(x, weights, found) <= min(errors) * 1.01
    assert min(errors) < 0.8 * errors[0]


def test_a_search_of_smoothquant_loses_to_none_of_its_strengths():
    asked, x, weights = site(2)

    def error(factors):
        """Of rounding weights, and inputs to 8 bits of their token."""
        scaled = x.double() / factors.double()
        step = scaled.abs().amax(1, keepdim=True) / 127
        seen = (scaled / step).round() * step
        return sum(float((seen @ rounded(w * factors).T - x.double() @ w.double().T).square().sum()) for w in weights)

    found = error(SmoothQuant().factors(asked, SERIAL))
    fixed = [error(SmoothQuant(alpha=step / 20).factors(asked, SERIAL)) for step in range(2, 19, 2)]
    assert found <= min(fixed) * 1.05  # what is searched by takes the error of inputs for noise


def test_factors_are_centred_bounded_and_leave_dead_channels_alone():
    factors = torch.tensor([1e-20, 1.0, 4.0, 1e20, float("nan"), float("inf"), 0.0, 9.0])
    alive = torch.tensor([True] * 7 + [False])
    found = usable(factors, alive)
    assert found.tolist() == pytest.approx([1 / WIDEST, 1, 4, WIDEST, 1, 1, 1, 1])
    assert usable(factors, torch.zeros(8, dtype=torch.bool)).tolist() == [1] * 8
