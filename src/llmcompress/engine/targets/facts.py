"""Kinds of facts about runtimes. A fact finds the modules that violate it, and options that mend them."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmcompress.formats.base import Entry
from llmcompress.formats.entry_checks import experts_of, fused, grids, named, quantised
from llmcompress.formats.schemes import FLOATS, PACKED, kind
from llmcompress.grids.base import INPUT_SPECS, PER_ROW, Spec
from llmcompress.grids.grid_type import type_of
from llmcompress.methods.base import DEFAULT_GROUP_SIZES

Changes = Mapping[str, Mapping[str, Any]]
"""By module, the options that the module should have instead; {"skip": True} leaves the module unquantised."""

SKIP: Mapping[str, Any] = {"skip": True}
_OF_MANY = re.compile(r"\.\d+\..*\.\d+(\.|$)")  # a module of an expert, whatever the list of experts is called
_SKIP_BY_HAND = "skip by hand: --set 'PATTERN: {skip: true}'"


@dataclass(frozen=True)
class DeviceLinear:
    """One linear as one device runs it: several matrices where the runtime fuses them.

    rows: number of outputs on the device, of each matrix, or of each part of a matrix that joins several. inputs:
    number of inputs on the device.
    """

    entries: tuple[Entry, ...]
    rows: tuple[int, ...]
    inputs: int

    @property
    def expert(self) -> bool:
        return experts_of(self.entries[0].module) is not None


@dataclass(frozen=True)
class LoadCase:
    """A checkpoint as a runtime loads it. entries: all tensors. shards: quantised linears as one device runs them.

    model_type: what config.json says.
    """

    entries: Sequence[Entry]
    shards: Sequence[DeviceLinear]
    model_type: str = ""


@dataclass(frozen=True)
class Violation:
    """Why a runtime does not load a checkpoint. what: the fact, and the value that violates it. modules: their names.

    by_hand: what a user may do. changes: options that mend the violation, empty where no option does. mending: the
    changes in words.
    """

    what: str
    modules: tuple[str, ...] = ()
    by_hand: str = ""
    changes: Changes = field(default_factory=dict)
    mending: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({named(self.modules)})" if self.modules else self.what


@dataclass(frozen=True, kw_only=True)
class Fact(ABC):
    """One thing a runtime's loader or kernels ask for. why: the fact as a sentence about the runtime ("it ...")."""

    why: str

    @abstractmethod
    def violations(self, case: LoadCase) -> list[Violation]:
        """What the runtime does not accept of a checkpoint."""


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
class BitWidths(Fact):
    """The runtime accepts these widths in bits."""

    bits: tuple[int, ...]

    def violations(self, case: LoadCase) -> list[Violation]:
        wrong = [(entry.module, grid) for entry, grid in quantised(case.entries) if grid.bits not in self.bits]
        if not wrong:
            return []
        return [
            Violation(
                f"{self.why}, not {wrong[0][1].bits}",
                tuple(name for name, _ in wrong),
                f"use --bits {' or '.join(map(str, self.bits))}",
            )
        ]


@dataclass(frozen=True)
class Asymmetric(Fact):
    """The runtime accepts asymmetric grids of these widths in bits only. experts: the fact is of experts alone."""

    bits: tuple[int, ...] = ()
    experts: bool = False

    def violations(self, case: LoadCase) -> list[Violation]:
        wrong = [
            (entry.module, grid)
            for entry, grid in quantised(case.entries)
            if not grid.symmetric
            and grid.bits not in self.bits
            and (not self.experts or experts_of(entry.module) is not None)
        ]
        if not wrong:
            return []
        names = tuple(name for name, _ in wrong)
        return [
            Violation(
                f"{self.why}, not {wrong[0][1].name}",
                names,
                "use --sym",
                {name: {"sym": True} for name in names},
                "make the grid symmetric",
            )
        ]


@dataclass(frozen=True)
class Symmetric(Fact):
    """The runtime accepts symmetric grids in groups, for weights of these types; all other grids must be asymmetric."""

    dtypes: tuple[str, ...] = ()

    def violations(self, case: LoadCase) -> list[Violation]:
        names = tuple(
            entry.module
            for entry, grid in quantised(case.entries)
            if grid.symmetric and (grid.group_size == PER_ROW or entry.source.dtype not in self.dtypes)
        )
        if not names:
            return []
        changes = {name: {"sym": False} for name in names}
        return [Violation(self.why, names, "use --asym", changes, "make the grid asymmetric")]


@dataclass(frozen=True)
class Groups(Fact):
    """The runtime accepts packed codes in groups of these sizes (None: of any size), and no group on two devices.

    rows: whether it accepts one scale per row.
    """

    sizes: tuple[int, ...] | None
    rows: bool = True

    def __str__(self) -> str:
        sizes = "any size" if self.sizes is None else ", ".join(map(str, self.sizes))
        return f"{sizes}, per row" if self.rows else sizes

    def violations(self, case: LoadCase) -> list[Violation]:
        coded = [(entry, grid) for entry, grid in quantised(case.entries) if kind(grid, entry.inputs) == PACKED]
        sizes = {entry.module: grid.group_size for entry, grid in coded}
        return self._unknown_sizes(coded, sizes) + self._split_groups(case, sizes)

    def _unknown_sizes(self, coded: Sequence[tuple[Entry, Spec]], sizes: Mapping[str, int]) -> list[Violation]:
        found = []
        for size in dict.fromkeys(size for size in sizes.values() if not self._takes(size)):
            names = tuple(name for name in sizes if sizes[name] == size)
            what = f"{self.why}, not {'one scale per row' if size == PER_ROW else size}"
            # one new size for all of them, as a loader may know only one
            widths = {entry.in_features for entry, grid in coded if grid.group_size == size}
            found.append(self._mended(what, names, size, widths))
        return found

    def _split_groups(self, case: LoadCase, sizes: Mapping[str, int]) -> list[Violation]:
        found = []
        inputs = {entry.module: shard.inputs for shard in case.shards for entry in shard.entries}
        for width, size in dict.fromkeys((inputs[name], size) for name, size in sizes.items()):
            if size != PER_ROW and self._takes(size) and width % size:
                names = tuple(name for name in sizes if (inputs[name], sizes[name]) == (width, size))
                what = f"groups of {size} do not divide the {width} inputs that a device holds"
                found.append(self._mended(what, names, size, {width}))
        return found

    def _takes(self, size: int) -> bool:
        return self.rows if size == PER_ROW else self.sizes is None or size in self.sizes

    def _mended(self, what: str, names: tuple[str, ...], asked: int, widths: set[int]) -> Violation:
        """A change to the next smaller size that divides all widths, else the next larger, else one scale per row."""
        fitting = [size for size in self.sizes or DEFAULT_GROUP_SIZES if all(width % size == 0 for width in widths)]
        finer = [size for size in fitting if asked == PER_ROW or size < asked]
        new = max(finer) if finer else min(fitting) if fitting else PER_ROW if self.rows else None
        if new is None:
            return Violation(what, names, _SKIP_BY_HAND)
        mending = "use one scale per row" if new == PER_ROW else f"use groups of {new}"
        changes = {name: {"group_size": new} for name in names}
        return Violation(what, names, f"use --group-size {new}", changes, mending)


@dataclass(frozen=True)
class Multiples(Fact):
    """The numbers of outputs and inputs on a device are multiples of these, of experts or of all other linears.

    The fact is about kernels for 16-bit inputs: linears with rounded inputs run by other kernels.
    """

    outputs: int
    inputs: int
    experts: bool = False

    def violations(self, case: LoadCase) -> list[Violation]:
        ragged = [
            shard
            for shard in case.shards
            if shard.expert == self.experts
            and shard.entries[0].inputs is None
            and (sum(shard.rows) % self.outputs or shard.inputs % self.inputs)
        ]
        return _left_out(self.why, ragged, case, lambda shard: f"{sum(shard.rows)} x {shard.inputs}")


@dataclass(frozen=True)
class Words(Fact):
    """Codes along the inputs fill whole 32-bit words; so do stored zero points along the outputs."""

    zeros: bool  # whether symmetric grids have stored zero points too

    def violations(self, case: LoadCase) -> list[Violation]:
        return _left_out(self.why, [s for s in case.shards if self._ragged(s)], case, _extents)

    def _ragged(self, shard: DeviceLinear) -> bool:
        entry = shard.entries[0]
        grid = entry.grid
        if grid is None or kind(grid, entry.inputs) != PACKED:
            return False
        zeros = self.zeros or not grid.symmetric
        return bool(shard.inputs * grid.bits % 32) or (zeros and any(rows * grid.bits % 32 for rows in shard.rows))


@dataclass(frozen=True)
class WholeTiles(Fact):
    """Matrices whose scales are those of tiles consist of whole ones on a device; so does each part of fused ones."""

    def violations(self, case: LoadCase) -> list[Violation]:
        return _left_out(self.why, [shard for shard in case.shards if self._ragged(shard)], case, _extents)

    def _ragged(self, shard: DeviceLinear) -> bool:
        grid = shard.entries[0].grid
        if grid is None or grid.tile is None:
            return False
        return bool(shard.inputs % grid.tile[1]) or any(rows % grid.tile[0] for rows in shard.rows)


def _extents(shard: DeviceLinear) -> str:
    return f"{' + '.join(map(str, shard.rows))} x {shard.inputs}"


def _left_out(
    why: str, ragged: Sequence[DeviceLinear], case: LoadCase, shape: Callable[[DeviceLinear], str]
) -> list[Violation]:
    """Linears of the wrong shape load unquantised only; leaving out all of them would compress nothing."""
    if not ragged:
        return []
    names = tuple(entry.module for shard in ragged for entry in shard.entries)
    some = len(names) < len(quantised(case.entries))
    return [
        Violation(
            f"{why}, not {shape(ragged[0])}",
            names,
            _SKIP_BY_HAND if some else "use --format dense",
            dict.fromkeys(names, SKIP) if some else {},
            f"leave {'it' if len(names) == 1 else f'these {len(names)} matrices'} unquantised",
        )
    ]


@dataclass(frozen=True)
class NaturalOrder(Fact):
    """Groups are runs of neighbouring inputs. One scale per row has no order of groups."""

    def violations(self, case: LoadCase) -> list[Violation]:
        permuted = tuple(entry.module for entry, _ in quantised(case.entries) if entry.permuted)
        if not permuted or all(grid.group_size == PER_ROW for grid in grids(case.entries)):
            return []
        changes = {name: {"actorder": "static"} for name in permuted}
        return [Violation(self.why, permuted, "use --actorder static", changes, "use static groups")]


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


def _inputs(entry: Entry) -> str:
    return "none" if entry.inputs is None else entry.inputs.name


def _towards(best: Entry, entry: Entry, static: bool) -> dict[str, Any]:
    """The options that give a matrix the scheme of `best`. static: whether the matrix also gets static groups."""
    old, new = entry.grid, best.grid
    assert old is not None
    assert new is not None
    pairs: dict[str, tuple[Any, Any]] = {"bits": (old.bits, new.bits)}
    if type_of(new).grouped:
        pairs |= {"group_size": (old.group_size, new.group_size), "sym": (old.symmetric, new.symmetric)}
    pairs |= {"type": (old.type, new.type), "activations": (_inputs(entry), _inputs(best))}
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
class Unread(Fact):
    """Modules that the runtime does not load. which: finds them. quantised: whether unquantised modules load."""

    which: Callable[[Entry], bool]
    quantised: bool = True
    by_hand: str = ""

    def violations(self, case: LoadCase) -> list[Violation]:
        looked = [entry for entry in case.entries if entry.grid is not None or not self.quantised]
        names = tuple(entry.module for entry in looked if self.which(entry))
        return [Violation(self.why, names, self.by_hand)] if names else []


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
            if experts_of(entry.module) is not None and taken is not None and _inputs(entry) not in taken:
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
            and (grid.type, grid.bits, _inputs(entry)) not in self.taken
        ]
        if not wrong:
            return []
        names = tuple(entry.module for entry in wrong)
        return [Violation(f"{self.why}, not {scheme_name(wrong[0])}", names, self.by_hand)]


@dataclass(frozen=True)
class Devices(Fact):
    """The devices that run a scheme. A user should know them, and no checkpoint can violate the fact."""

    def violations(self, case: LoadCase) -> list[Violation]:
        return []
