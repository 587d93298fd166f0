"""Facts about schemes, a grid with a rounding of inputs: which are read, and which of them together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmcompress.engine.targets.facts import SKIP, Fact, LoadCase, Violation
from llmcompress.formats.base import Entry
from llmcompress.formats.entry_checks import experts_of, fused, quantised
from llmcompress.formats.schemes import FLOATS, kind
from llmcompress.grids.base import PER_ROW, Spec
from llmcompress.grids.grid_type import type_of


@dataclass(frozen=True)
class Alike(Fact):
    """Matrices that the runtime fuses (`formats.entry_checks.fused`) have one scheme."""

    def violations(self, case: LoadCase) -> list[Violation]:
        found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
        for name, members in fused(case.entries).items():
            if len({(entry.grid, entry.inputs, entry.permuted) for entry in members}) > 1:
                leaf = name.rpartition(".")[2]
                kinds = " and ".join(dict.fromkeys(scheme_name(entry) for entry in members))
                what = f"it runs {leaf} as one, and its parts would have {kinds}"
                mending, changes = self._mended(members)
                found.setdefault((what, mending), {}).update(changes)
        by_hand = "give all parts the same options with --set"
        return [Violation(what, tuple(changes), by_hand, changes, mend) for (what, mend), changes in found.items()]

    def _mended(self, members: Sequence[Entry]) -> tuple[str, dict[str, dict[str, Any]]]:
        """The same scheme for all members: none if one member has none, else the grid that expresses the most."""
        coded = quantised(members)
        if len(coded) < len(members):
            return "leave all parts unquantised", {entry.module: dict(SKIP) for entry, _ in coded}
        best, _ = max(coded, key=lambda pair: _richness(pair[1]))
        static = len({entry.permuted for entry in members}) > 1
        changes = {entry.module: _towards(best, entry, static) for entry in members}
        return f"give all parts {scheme_name(best)}", {module: change for module, change in changes.items() if change}


def scheme_name(entry: Entry) -> str:
    """The name of the grid of a matrix, and of the rounding of its inputs."""
    grid = entry.grid.name if entry.grid else "16 bits"
    return grid if entry.inputs is None else f"{grid} with {entry.inputs.name} inputs"


def inputs_name(entry: Entry) -> str:
    """The name of the rounding of what a matrix reads; "none" for inputs as they are."""
    return "none" if entry.inputs is None else entry.inputs.name


def _towards(best: Entry, entry: Entry, static: bool) -> dict[str, Any]:
    """The options that give a matrix the scheme of `best`. static: whether the matrix also gets static groups."""
    old, new = entry.grid, best.grid
    assert old is not None
    assert new is not None
    pairs: dict[str, tuple[Any, Any]] = {"bits": (old.bits, new.bits)}
    if type_of(new).grouped:
        pairs |= {"group_size": (old.group_size, new.group_size), "sym": (old.symmetric, new.symmetric)}
    pairs |= {"type": (old.type, new.type), "activations": (inputs_name(entry), inputs_name(best))}
    anew = old.type != new.type  # which then has none of the options that the other had of its own
    own = ("bits", "group_size", "sym")
    change = {key: wanted for key, (had, wanted) in pairs.items() if had != wanted or (anew and key in own)}
    return {**change, "actorder": "static"} if static and entry.permuted else change


def _richness(grid: Spec) -> tuple[int, int, bool]:
    """A sort key of grids by what they can express: more bits, then smaller groups, then a zero point."""
    return grid.bits, -grid.group_size if grid.group_size != PER_ROW else -(1 << 31), not grid.symmetric


@dataclass(frozen=True)
class OneScheme(Fact):
    """All quantised matrices share one scheme. order: whether they also share one activation order."""

    order: bool = False

    def violations(self, case: LoadCase) -> list[Violation]:
        kinds: dict[tuple[str, bool], list[str]] = {}
        for entry, _ in quantised(case.entries):
            ordered = self.order and bool(entry.options.get("act_order", False))
            kinds.setdefault((scheme_name(entry), ordered), []).append(entry.module)
        if len(kinds) < 2:
            return []
        common, *others = sorted(kinds.items(), key=lambda item: -len(item[1]))
        names = tuple(name for _, modules in others for name in modules)
        what = f"{self.why}, not both {common[0][0]} and {others[0][0][0]}"
        return [Violation(what, names, "give all matrices the same options")]


@dataclass(frozen=True)
class Alone(Fact):
    """Matrices of one type of grid are read where all that are quantised are of it."""

    type: str

    def violations(self, case: LoadCase) -> list[Violation]:
        coded = quantised(case.entries)
        names = tuple(entry.module for entry, grid in coded if grid.type == self.type)
        return [Violation(self.why, names, "give them another type")] if 0 < len(names) < len(coded) else []


@dataclass(frozen=True)
class Beside(Fact):
    """Several schemes in one checkpoint, and the grids `others` at all, are read beside matrices of grid `key` only."""

    key: str
    others: tuple[str, ...]

    def violations(self, case: LoadCase) -> list[Violation]:
        coded = quantised(case.entries)
        if any(grid.type == self.key for _, grid in coded):
            return []
        names = tuple(entry.module for entry, grid in coded if grid.type in self.others)
        if not names and len({(grid, entry.inputs) for entry, grid in coded}) > 1:
            names = tuple(entry.module for entry, _ in coded)
        return [Violation(self.why, names, "use --format compressed-tensors")] if names else []


@dataclass(frozen=True)
class ExpertsAlike(Fact):
    """The runtime decodes the experts of all layers by one scheme; some in 16 bits only if that is of 8-bit floats.

    Where no experts are quantised it goes by the scheme that comes first.
    """

    def violations(self, case: LoadCase) -> list[Violation]:
        experts = [entry for entry in case.entries if entry.linear and experts_of(entry.module)]
        coded = quantised(experts) or quantised(case.entries)
        if not experts or not coded:
            return []
        entry, grid = coded[0]
        others = [other for other in experts if (other.grid, other.inputs) != (entry.grid, entry.inputs)]
        if kind(grid, entry.inputs) == FLOATS:
            others = [other for other in others if other.grid is not None]
        if not others:
            return []
        what = f"{self.why}, not both {scheme_name(entry)} and {scheme_name(others[0])}"
        names = tuple(other.module for other in others)
        return [Violation(what, names, "give the experts of all layers the same options, or use --format dense")]


@dataclass(frozen=True)
class Schemes(Fact):
    """Matrices of experts, or all others, have one of these schemes.

    taken: the type of the grid, its bits, and inputs ("none": as they are).
    """

    taken: tuple[tuple[str, int, str], ...]
    experts: bool = False
    by_hand: str = ""

    def violations(self, case: LoadCase) -> list[Violation]:
        wrong = [
            entry
            for entry, grid in quantised(case.entries)
            if (experts_of(entry.module) is not None) == self.experts
            and (grid.type, grid.bits, inputs_name(entry)) not in self.taken
        ]
        if not wrong:
            return []
        names = tuple(entry.module for entry in wrong)
        return [Violation(f"{self.why}, not {scheme_name(wrong[0])}", names, self.by_hand)]
