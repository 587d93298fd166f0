"""Facts about which models, and which of their modules, a runtime loads."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmcompress.engine.targets.facts import Fact, LoadCase, Violation
from llmcompress.formats.base import Entry
from llmcompress.formats.entry_checks import quantised

_OF_MANY = re.compile(r"\.\d+\..*\.\d+(\.|$)")  # a module of an expert, whatever the list of experts is called


@dataclass(frozen=True)
class ModelTypes(Fact):
    """The runtime was seen to load codes of these model types, and of no others."""

    seen: tuple[str, ...]

    def violations(self, case: LoadCase) -> list[Violation]:
        return [] if case.model_type in self.seen else [Violation(f"{self.why}, not {case.model_type!r}")]


@dataclass(frozen=True)
class LostTypes(Fact):
    """The runtime does not load codes of these model types. experts: those of experts alone. by_hand: the way out."""

    lost: tuple[str, ...]
    experts: bool = False
    by_hand: str = "use --format dense"

    def violations(self, case: LoadCase) -> list[Violation]:
        if case.model_type not in self.lost:
            return []
        if self.experts and not any(_OF_MANY.search(entry.module) for entry, _ in quantised(case.entries)):
            return []
        return [Violation(f"{self.why}, as in models of type {case.model_type!r}", (), self.by_hand)]


@dataclass(frozen=True)
class LackedTypes(Fact):
    """The runtime cannot run models of these types at all. lacked: why not, by model type."""

    lacked: Mapping[str, str]

    def violations(self, case: LoadCase) -> list[Violation]:
        reason = self.lacked.get(case.model_type)
        if reason is None:
            return []
        what = f"{self.why}, {case.model_type!r} among them: {reason}"
        return [Violation(what, (), "see `llmcompress list targets` for others")]


@dataclass(frozen=True)
class Unread(Fact):
    """Modules that the runtime does not load. which: finds them. quantised: whether unquantised modules load."""

    which: Callable[[Entry], bool]
    quantised: bool = True
    by_hand: str = ""

    def violations(self, case: LoadCase) -> list[Violation]:
        looked = [entry for entry in case.entries if entry.grid is not None or not self.quantised]
        names = tuple(entry.module for entry in looked if self.which(entry))
        return [Violation(self.why, names, self.by_hand)] if names else []
