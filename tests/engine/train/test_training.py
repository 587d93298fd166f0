"""Training takes the steps of torch's Adam on the same schedule, keeps its best look, and goes on from a stop."""

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch

from llmcompress.engine.train.trained import Adam
from llmcompress.engine.train.training import ONE_OF, Look, NoGainError, Training, held_apart


@dataclass
class Numbers:
    """Numbers that are learnt."""

    pace: ClassVar[float] = 1.0
    learnt: torch.Tensor


class FastNumbers(Numbers):
    """Numbers that are learnt in longer steps."""

    pace: ClassVar[float] = 4.0


@dataclass
class Distances:
    """Learns numbers that lie near the windows: the mean squared distance to their values."""

    tokens: torch.Tensor
    trained: dict[str, Numbers] = field(
        default_factory=lambda: {"slow": Numbers(torch.zeros(3)), "fast": FastNumbers(torch.zeros(2, 2))}
    )

    def heads(self):
        return nullcontext()

    def _loss(self, learnt, windows):
        aim = self.tokens[list(windows)].double().mean()
        return sum((values.double() - aim).square().mean() for values in learnt.values())

    def divergence(self, windows):
        return float(self._loss({name: item.learnt for name, item in self.trained.items()}, windows))

    def gradients(self, windows):
        learnt = {name: item.learnt.clone().requires_grad_() for name, item in self.trained.items()}
        loss = self._loss(learnt, windows)
        loss.backward()
        return loss.item(), {name: values.grad for name, values in learnt.items()}


class Memory:
    """A staging that keeps what it is given, as copies."""

    def __init__(self):
        self.kept = None

    def keep_training(self, tensors, facts):
        self.kept = {name: tensor.clone() for name, tensor in tensors.items()}, facts

    def training(self):
        return self.kept


class StopError(Exception):
    pass


TEXT = held_apart({"one": torch.linspace(0.9, 1.1, 40)[:, None], "other": torch.linspace(0.8, 1.2, 20)[:, None]})


def test_one_window_of_sixteen_is_held_back_of_each_text():
    assert {name: list(numbers) for name, numbers in TEXT.held.items()} == {"one": [15, 31], "other": [55]}
    assert sorted([*TEXT.trained, 15, 31, 55]) == list(range(60))
    few = held_apart({"few": torch.zeros(5, 1)})
    assert list(few.held["few"]) == [4]
    assert ONE_OF == 16


def test_every_window_is_met_before_any_is_met_again():
    order = TEXT.order(3 * 57 - 2, seed=1)
    assert [sorted(order[start : start + 57]) for start in (0, 57)] == [sorted(TEXT.trained)] * 2
    assert order[:57] != order[57:114]
    assert order == TEXT.order(len(order), seed=1) != TEXT.order(len(order), seed=2)


def test_steps_are_those_of_adam_of_torch_at_the_same_rates():
    learner, steps, rate = Distances(TEXT.tokens), 20, 0.05
    first, best = Training(learner, TEXT, steps, 4, rate, seed=3).run(None)
    assert first.step == 0
    assert best.mean < first.mean / 4
    other = {name: torch.zeros_like(item.learnt).requires_grad_() for name, item in learner.trained.items()}
    groups = [{"params": [other["slow"]], "pace": 1.0}, {"params": [other["fast"]], "pace": 4.0}]
    adam = torch.optim.Adam(groups, betas=(0.9, 0.95), eps=1e-12)
    order, after = TEXT.order(steps * 4, seed=3), {}
    for step in range(steps):
        for group in adam.param_groups:
            rising = min(1.0, (step + 1) / (steps / 10))
            group["lr"] = rate * group["pace"] * rising * 0.5 * (1 + math.cos(math.pi * step / steps))
        adam.zero_grad()
        learner._loss(other, order[4 * step : 4 * step + 4]).backward()
        adam.step()
        after[step + 1] = {name: values.detach().clone() for name, values in other.items()}
    for name, item in learner.trained.items():
        torch.testing.assert_close(item.learnt, after[best.step][name], rtol=1e-5, atol=1e-6)


def test_what_no_gradient_reaches_stays():
    trained = {"met": Numbers(torch.zeros(2)), "other": Numbers(torch.ones(2))}
    Adam(trained).step({"met": torch.tensor([2.0, -3.0])}, rate=0.5)
    assert trained["met"].learnt.tolist() == pytest.approx([-0.5, 0.5])
    assert trained["other"].learnt.tolist() == [1, 1]


@pytest.mark.parametrize("keeps", [1, 4])
def test_a_stopped_training_goes_on_to_the_same_numbers(keeps):
    whole = Distances(TEXT.tokens)
    looks = Training(whole, TEXT, 12, 4, 0.05, seed=0).run(None)
    memory, stopped_at = Memory(), []

    def stop(done):
        stopped_at.append(done)
        if done % 5 == 0 and done not in stopped_at[:-1]:
            raise StopError

    for _ in range(2):
        with pytest.raises(StopError):
            Training(Distances(TEXT.tokens), TEXT, 12, 4, 0.05, seed=0, keeps=keeps).run(memory, stop)
    last = Distances(TEXT.tokens)
    assert Training(last, TEXT, 12, 4, 0.05, seed=0, keeps=keeps).run(memory, stop) == looks
    assert stopped_at == list(range(1, 13))
    assert all(torch.equal(last.trained[name].learnt, item.learnt) for name, item in whole.trained.items())


def test_a_look_gains_where_the_mean_falls_and_no_slice_rises():
    first = Look(0, {"one": 1.0, "other": 2.0})
    assert Look(1, {"one": 1.0, "other": 1.9}).gains(first)
    assert not Look(1, {"one": 1.01, "other": 1.0}).gains(first)
    assert not first.gains(first)
    assert not Look(1, {"one": math.nan, "other": 1.0}).gains(first)


def test_training_that_gains_nothing_is_refused():
    text = held_apart({"near": torch.zeros(32, 1), "far": torch.ones(32, 1)})
    text = text._replace(trained=[number for number in text.trained if number >= 32])  # away from the near ones
    with pytest.raises(NoGainError, match="did not fall: near 0, far 2 before"):
        Training(Distances(text.tokens), text, 8, 4, 0.05, seed=0).run(None)


def test_figures_that_are_not_finite_are_refused():
    tokens = TEXT.tokens.clone()
    tokens[TEXT.order(4, seed=0)[0]] = math.inf
    with pytest.raises(NoGainError, match="the divergence is inf after 0 steps"):
        Training(Distances(tokens), TEXT._replace(tokens=tokens), 8, 4, 0.05, seed=0).run(None)


class Faltering(Distances):
    """From some step on, one window at a time, its divergence or a gradient is no number."""

    steps, broken = 0, "divergence"

    def gradients(self, windows):
        self.steps += 1
        divergence, slopes = super().gradients(windows)
        if self.steps > 10:
            divergence = math.nan if self.broken == "divergence" else divergence
            slopes["fast"][0, 0] = math.nan if self.broken == "gradient" else 0
        return divergence, slopes


@pytest.mark.parametrize("broken", ["divergence", "gradient"])
def test_what_gained_before_figures_that_are_not_finite_stays(broken):
    learner = Faltering(TEXT.tokens)
    learner.broken = broken
    first, best = Training(learner, TEXT, 16, 4, 0.05, seed=0).run(None)
    assert best.step == 10
    assert learner.steps == 11
    assert learner.divergence(TEXT.held["one"]) == best.divergences["one"] < first.divergences["one"]
