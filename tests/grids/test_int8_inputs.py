"""Inputs rounded as LLM.int8() rounds them, against products of whole numbers."""

import torch

from llmcompress.grids.int8_inputs import BesideOutliers, ByThreshold


def test_products_are_those_of_an_int8_kernel_and_a_float_one():
    g = torch.Generator().manual_seed(0)
    x, codes = torch.randn(6, 30, generator=g), torch.randint(-127, 128, (8, 30), generator=g)
    x[:, [4, 9]] *= 40
    index = torch.tensor([4, 9])
    scale = torch.rand(8, generator=g) + 0.5
    rest = [column for column in range(30) if column not in (4, 9)]
    step = x[:, rest].abs().amax(dim=1) / 127
    whole = (x[:, rest] / step[:, None]).round().to(torch.int32)
    product = (whole.long() @ codes[:, rest].T.long()).double() * step[:, None].double() * scale.double()
    outliers = x[:, index].double() @ (codes[:, index].double() * scale[:, None].double()).T
    found = BesideOutliers(index).rounded(x) @ (codes * scale[:, None]).T
    assert torch.allclose(found.double(), product + outliers, rtol=1e-4, atol=1e-3)


def test_channels_that_reach_the_threshold_anywhere_stay_as_they_are():
    x = torch.tensor([[1.0, 6.0, -0.303], [2.54, 5.0, 0.2]])
    found = ByThreshold(6.0).rounded(x)
    assert torch.equal(found[:, 1], x[:, 1])
    assert torch.allclose(found[0], torch.tensor([1.0, 6.0, round(-0.303 * 127) / 127]))
    step = 5.0 / 127  # of the second token, whose 5 is below the threshold
    assert torch.allclose(found[1, ::2], torch.tensor([round(2.54 / step), round(0.2 / step)]) * step)


def test_zero_tokens_stay_zero():
    assert torch.equal(ByThreshold(6.0).rounded(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))
