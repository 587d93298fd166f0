"""The machine that a runtime runs on, and facts about what its devices run."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from llmcompress.engine.targets.facts import Fact, LoadCase, Violation
from llmcompress.errors import RecipeError
from llmcompress.formats.base import Entry

_ARCHITECTURE = re.compile(r"sm_(\d{1,2})(\d)[af]?")


@dataclass(frozen=True)
class Machine:
    """What a runtime runs on. tp: devices that split every matrix. gpu: compute capability; None where not known."""

    tp: int = 1
    gpu: tuple[int, int] | None = None

    @classmethod
    def named(cls, tp: int, gpu: str | None) -> "Machine":
        """By the options --tp and --gpu; RecipeError for what is no architecture of a GPU, such as sm_90."""
        if gpu is None:
            return cls(tp)
        if not (found := _ARCHITECTURE.fullmatch(gpu)):
            raise RecipeError(f"--gpu {gpu} is no architecture of a GPU", "say sm_90 for compute capability 9.0")
        return cls(tp, (int(found[1]), int(found[2])))

    def __str__(self) -> str:
        parts = [f"tp {self.tp}"] if self.tp > 1 else []
        return ", ".join(parts if self.gpu is None else [*parts, f"sm_{self.gpu[0]}{self.gpu[1]}"])


@dataclass(frozen=True)
class OnGpus(Fact):
    """What the runtime does with some modules on GPUs from one compute capability on, to below another.

    which: finds the modules among all. heads: the width of heads that is meant, 0 for all. runs: whether it runs them
    elsewhere as well, in another way that `why` says.
    """

    which: Callable[[Entry], bool]
    least: tuple[int, int] = (0, 0)
    below: tuple[int, int] = (1000, 0)
    heads: int = 0
    runs: bool = False
    by_hand: str = ""

    def violations(self, case: LoadCase) -> list[Violation]:
        names = () if self.runs else self._elsewhere(case)
        return [Violation(self.why, names, self.by_hand)] if names else []

    def remarks(self, case: LoadCase) -> list[str]:
        return [self.why] if self.runs and self._elsewhere(case) else []

    def _elsewhere(self, case: LoadCase) -> tuple[str, ...]:
        if case.gpu is None or self.least <= case.gpu < self.below or self.heads not in (0, case.head_width):
            return ()
        return tuple(entry.module for entry in case.entries if self.which(entry))


@dataclass(frozen=True)
class Devices(Fact):
    """The devices that run a scheme, where `plan` is not told of them: no checkpoint can violate the fact."""

    def violations(self, case: LoadCase) -> list[Violation]:
        return []
