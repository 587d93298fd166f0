"""Facts about how a runtime rounds the inputs of matrices."""

from collections.abc import Mapping
from dataclasses import dataclass

from llmcompress.engine.targets.facts import Fact, LoadCase, Violation
from llmcompress.engine.targets.scheme_facts import inputs_name, scheme_name
from llmcompress.formats.base import Entry
from llmcompress.formats.entry_checks import experts_of, quantised
from llmcompress.formats.schemes import kind
from llmcompress.grids.base import INPUT_SPECS, Spec


@dataclass(frozen=True)
class RoundedInputs(Fact):
    """The runtime rounds inputs for weights of these kinds of storage (`formats.schemes`) only.

    by_token: further kinds, for which it does so token by token only.
    """

    kinds: tuple[str, ...]
    by_token: tuple[str, ...] = ()

    def violations(self, case: LoadCase) -> list[Violation]:
        wrong = [entry for entry, grid in quantised(case.entries) if not self._rounds(entry, grid)]
        if not wrong:
            return []
        names = tuple(entry.module for entry in wrong)
        changes = {name: {"activations": "none"} for name in names}
        what = f"{self.why}, not {scheme_name(wrong[0])}"
        return [Violation(what, names, "use --activations none", changes, "leave inputs as they are")]

    def _rounds(self, entry: Entry, grid: Spec) -> bool:
        if entry.inputs is None:
            return True
        stored = kind(grid, entry.inputs)
        return stored in self.kinds or (stored in self.by_token and entry.inputs.dynamic)


@dataclass(frozen=True)
class InputsOfExperts(Fact):
    """The runtime takes experts with these inputs only, the best first ("none": as they are).

    takes: inputs by type of grid, of integers by kind of storage. Of others any will do.
    """

    takes: Mapping[str, tuple[str, ...]]

    def violations(self, case: LoadCase) -> list[Violation]:
        found: dict[tuple[str, str], list[str]] = {}
        for entry, grid in quantised(case.entries):
            taken = self.takes.get(grid.type, self.takes.get(kind(grid, entry.inputs)))
            if experts_of(entry.module) is not None and taken is not None and inputs_name(entry) not in taken:
                found.setdefault((scheme_name(entry), taken[0]), []).append(entry.module)
        return [
            Violation(
                f"{self.why}, not {scheme}",
                tuple(names),
                f"use --activations {best}",
                {name: {"activations": best} for name in names},
                "leave inputs as they are" if best == "none" else f"use {best}",
            )
            for (scheme, best), names in found.items()
        ]


@dataclass(frozen=True)
class ScalesByToken(Fact):
    """The runtime finds scales of inputs token by token, and reads no fixed scale."""

    def violations(self, case: LoadCase) -> list[Violation]:
        fixed = {e.module: e.inputs for e in case.entries if e.inputs is not None and not e.inputs.dynamic}
        if not fixed:
            return []
        other = {spec.type: name for name, spec in INPUT_SPECS.items() if spec.dynamic and spec.group is None}
        changes = {name: {"activations": other.get(spec.type, "none")} for name, spec in fixed.items()}
        new = next(iter(changes.values()))["activations"]
        return [Violation(self.why, tuple(fixed), f"use --activations {new}", changes, f"use {new}")]
