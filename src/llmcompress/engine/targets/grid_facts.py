"""Facts about the grid of a matrix: its bits, its zero points, and its groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmcompress.engine.targets.facts import SKIP_BY_HAND, Fact, LoadCase, Violation
from llmcompress.formats.base import Entry
from llmcompress.formats.entry_checks import experts_of, grids, quantised
from llmcompress.formats.schemes import PACKED, kind
from llmcompress.grids.base import PER_ROW, Spec
from llmcompress.methods.base import DEFAULT_GROUP_SIZES


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
            return Violation(what, names, SKIP_BY_HAND)
        mending = "use one scale per row" if new == PER_ROW else f"use groups of {new}"
        changes = {name: {"group_size": new} for name in names}
        return Violation(what, names, f"use --group-size {new}", changes, mending)


@dataclass(frozen=True)
class NaturalOrder(Fact):
    """Groups are runs of neighbouring inputs. One scale per row has no order of groups."""

    def violations(self, case: LoadCase) -> list[Violation]:
        permuted = tuple(entry.module for entry, _ in quantised(case.entries) if entry.permuted)
        if not permuted or all(grid.group_size == PER_ROW for grid in grids(case.entries)):
            return []
        changes = {name: {"actorder": "static"} for name in permuted}
        return [Violation(self.why, permuted, "use --actorder static", changes, "use static groups")]
