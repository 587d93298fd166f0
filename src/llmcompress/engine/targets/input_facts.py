"""Kinds of facts about runtimes that round inputs, and about the devices on which they do."""

from dataclasses import dataclass

from llmcompress.engine.targets.facts import Fact, LoadCase, Violation, scheme_name
from llmcompress.formats.entry_checks import quantised
from llmcompress.formats.schemes import kind
from llmcompress.grids.base import INPUT_SPECS


@dataclass(frozen=True)
class RoundedInputs(Fact):
    """Ways to store weights (`formats.schemes`) that are multiplied by rounded inputs."""

    kinds: tuple[str, ...]

    def violations(self, case: LoadCase) -> list[Violation]:
        wrong = [
            entry
            for entry, grid in quantised(case.entries)
            if entry.inputs is not None and kind(grid, entry.inputs) not in self.kinds
        ]
        if not wrong:
            return []
        names = tuple(entry.module for entry in wrong)
        changes = {name: {"activations": "none"} for name in names}
        what = f"{self.why}, not {scheme_name(wrong[0])}"
        return [Violation(what, names, "use --activations none", changes, "leave inputs as they are")]


@dataclass(frozen=True)
class ScalesByToken(Fact):
    """Inputs have no fixed scale."""

    def violations(self, case: LoadCase) -> list[Violation]:
        fixed = {e.module: e.inputs for e in case.entries if e.inputs is not None and not e.inputs.dynamic}
        if not fixed:
            return []
        other = {spec.type: name for name, spec in INPUT_SPECS.items() if spec.dynamic}
        changes = {name: {"activations": other[spec.type]} for name, spec in fixed.items()}
        new = next(iter(changes.values()))["activations"]
        return [Violation(self.why, tuple(fixed), f"use --activations {new}", changes, f"use {new}")]


@dataclass(frozen=True)
class Devices(Fact):
    """Which devices run a scheme: to be known, but nothing that a checkpoint could break."""

    def violations(self, case: LoadCase) -> list[Violation]:
        return []
