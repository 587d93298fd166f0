"""The drift of an input: its mean, and that the last who asks for it has its memory alone."""

import torch

from llmcompress.stats.drift import Drift
from llmcompress.workers import SERIAL


def test_the_mean_is_there_for_all_who_ask_but_after_the_last_one():
    generator = torch.Generator().manual_seed(0)
    here, there = (torch.randn(7, 5, generator=generator) for _ in range(2))
    drift = Drift(5, SERIAL)
    drift.update(there, here)
    drift.hessian = torch.eye(5)
    wanted = (there - here).double().T @ here.double() / 7
    for _ in range(2):
        torch.testing.assert_close(drift.finish().double(), wanted, rtol=1e-5, atol=1e-6)
    drift.expect_last()
    torch.testing.assert_close(drift.finish().double(), wanted, rtol=1e-5, atol=1e-6)
    assert drift.sum.numel() == 0
    assert drift.hessian is None
