"""Training step by step: what was learnt is kept, so that a later start goes on with it."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from llmcompress.engine.process.process_memory import return_freed_memory
from llmcompress.engine.train.trained import Adam, Learnt
from llmcompress.errors import RunError
from llmcompress.store.staging import Staging


class NoGainError(RunError):
    """Training made nothing better, so that there is nothing to go on with."""


AT_ONCE = 4  # windows of a step
ONE_OF = 16  # windows, one is held back
LEAST = 2 * ONE_OF  # windows to train on
BLOCK_STEPS = 64  # of a layer alone
_LOOKS = 8  # times that text held back is looked at during training
_RISING = 10  # one in so many steps
_BEST = "best"


class TrainingText(NamedTuple):
    """Windows [windows, length], the numbers of those that are trained on, and slices that are held back, by name."""

    tokens: Tensor
    trained: Sequence[int]
    held: Mapping[str, Sequence[int]]

    def order(self, count: int, seed: int) -> list[int]:
        """`count` windows to train on: all of them in a drawn order, then in another."""
        generator, found = torch.Generator().manual_seed(seed), list[int]()
        while len(found) < count:
            drawn = torch.randperm(len(self.trained), generator=generator).tolist()
            found += [self.trained[number] for number in drawn]
        return found[:count]


def held_back(windows: int, start: int = 0) -> range:
    """The numbers of the windows of a text that are held back, where the first has the number `start`."""
    return range(start + min(ONE_OF, windows) - 1, start + windows, ONE_OF)


def held_apart(parts: Mapping[str, Tensor]) -> TrainingText:
    """Windows [windows, length] of several texts by name, of each of which one in ONE_OF is held back."""
    trained: list[int] = []
    held: dict[str, range] = {}
    start = 0
    for name, part in parts.items():
        end = start + len(part)
        held[name] = held_back(len(part), start)
        trained += [number for number in range(start, end) if number not in held[name]]
        start = end
    return TrainingText(torch.cat(list(parts.values())), trained, held)


class Look(NamedTuple):
    """The divergence of each slice that is held back, after some steps."""

    step: int
    divergences: Mapping[str, float]

    @property
    def mean(self) -> float:
        return sum(self.divergences.values()) / len(self.divergences)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in self.divergences.items())

    def gains(self, first: "Look") -> bool:
        """Whether the mean has fallen since the first look, and no slice has risen."""
        kept = all(value <= first.divergences[name] for name, value in self.divergences.items())
        return kept and self.mean < first.mean


class Learner(Protocol):
    """What learns from windows, within `heads`. trained: by name."""

    @property
    def trained(self) -> Mapping[str, Learnt]: ...

    def heads(self) -> AbstractContextManager[None]: ...

    def divergence(self, windows: Sequence[int]) -> float:
        """The mean over some windows of what is to become less."""
        ...

    def gradients(self, windows: Sequence[int]) -> tuple[float, dict[str, Tensor]]:
        """The same mean, and its gradient at what is learnt, by name."""
        ...


class Training:
    """Steps of Adam, and looks at what is held back. rate: the highest; it rises, then falls along a cosine.

    keeps: after how many steps what was learnt is kept; it also is where a step is the last one of a start.
    """

    def __init__(
        self, learner: Learner, text: TrainingText, steps: int, at_once: int, rate: float, seed: int, keeps: int = 1
    ) -> None:
        self.learner, self.text, self.steps, self.at_once, self.rate = learner, text, steps, at_once, rate
        self.keeps = keeps
        self.adam = Adam(learner.trained)
        self.looks: list[Look] = []
        self.best: dict[str, Tensor] = {}
        self._order = text.order(steps * at_once, seed)

    def run(self, staged: Staging | None, watch: Callable[[int], None] = lambda done: None) -> tuple[Look, Look]:
        """Train, and leave the best values in what is trained; the first look, and the best.

        staged: where what was learnt is kept, and taken up; None for nowhere. watch: told after each step how many are
        done. Training ends early where the divergence, or a gradient, is not finite. NoGainError where no look gained.
        """
        if staged is not None:
            self._go_on(staged)
        with self.learner.heads():
            if not self.looks:
                self._look()
            diverged = ""
            while self.adam.steps < self.steps and not (diverged := self._step()):
                kept = self.adam.steps % self.keeps == 0 or self.adam.steps == self.steps
                if staged is not None and kept:
                    self._keep(staged)
                try:
                    watch(self.adam.steps)
                except BaseException:
                    if staged is not None and not kept:
                        self._keep(staged)
                    raise
        first, *later = self.looks
        good = [look for look in later if look.gains(first)]
        if diverged and not good:
            raise NoGainError(f"{diverged} after {self.adam.steps} steps", "nothing was written; try a lower --rate")
        if not good:
            raise NoGainError(
                f"the divergence on text held back did not fall: {first} before, {later[-1]} at the end",
                "nothing was written; try a lower --rate, more --steps or other text",
            )
        for name, item in self.learner.trained.items():
            item.learnt = self.best[name]
        return first, min(good, key=lambda look: look.mean)

    def _step(self) -> str:
        """One step, and a look where it is time for one; what is not finite, where no step can be taken."""
        done = self.adam.steps
        now = self._order[done * self.at_once : (done + 1) * self.at_once]
        divergence, gradients = self.learner.gradients(now)
        if not math.isfinite(divergence):
            return f"the divergence is {divergence}"
        if not all(bool(torch.isfinite(slope).all()) for slope in gradients.values()):
            return "a gradient is not finite"
        self.adam.step(gradients, self._rate(done))
        return_freed_memory()
        done += 1
        if done == self.steps or done % max(1, self.steps // _LOOKS) == 0:
            self._look()
        return ""

    def _rate(self, done: int) -> float:
        """The rate of the step after `done` ones: it rises at first, while Adam has seen few gradients."""
        risen = min(1.0, (done + 1) * _RISING / self.steps)
        return self.rate * risen * (1 + math.cos(math.pi * done / self.steps)) / 2

    def _look(self) -> None:
        divergences = {name: self.learner.divergence(windows) for name, windows in self.text.held.items()}
        now = Look(self.adam.steps, divergences)
        before = [look for look in self.looks if look.gains(self.looks[0])]
        if self.looks and now.gains(self.looks[0]) and all(now.mean < look.mean for look in before):
            self.best = {}  # not two of them at once
            self.best = {name: item.learnt.clone() for name, item in self.learner.trained.items()}
        self.looks.append(now)

    def _keep(self, staged: Staging) -> None:
        parts = {"learnt": {name: item.learnt for name, item in self.learner.trained.items()}, _BEST: self.best}
        parts |= {"mean": self.adam.means, "square": self.adam.squares}
        tensors = {f"{kind}/{name}": tensor for kind, held in parts.items() for name, tensor in held.items()}
        looks = [[look.step, dict(look.divergences)] for look in self.looks]
        staged.keep_training(tensors, {"steps": self.adam.steps, "looks": looks})

    def _go_on(self, staged: Staging) -> None:
        """Take over what an earlier start has kept, if it has kept anything."""
        found = staged.training()
        if found is None:
            return
        tensors, facts = found
        self.adam.steps = int(facts["steps"])
        self.looks = [Look(int(step), divergences) for step, divergences in facts["looks"]]
        for name, item in self.learner.trained.items():
            item.learnt = tensors[f"learnt/{name}"]
            self.adam.means[name], self.adam.squares[name] = tensors[f"mean/{name}"], tensors[f"square/{name}"]
        self.best = {name: tensors[f"{_BEST}/{name}"] for name in self.adam.means if f"{_BEST}/{name}" in tensors}
