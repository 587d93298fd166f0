"""Which matrices must share a grid, and which grids each may have: by the format, the runtime, and the widths."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmcompress.engine.plan.matrix_options import matches
from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.targets.base import Target, targets
from llmcompress.engine.targets.machine import Machine
from llmcompress.engine.targets.verdicts import violations
from llmcompress.errors import PlanError
from llmcompress.formats.base import Entry, Format
from llmcompress.formats.entry_checks import fused
from llmcompress.grids.base import PER_ROW, Spec
from llmcompress.grids.dense import DenseSpec
from llmcompress.grids.grid_type import grid_types

Patterns = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class MatrixGroup:
    """Matrices that get the same grid, and the grids to choose from, smallest first."""

    matrices: tuple[MatrixPlan, ...]
    grids: tuple[Spec, ...]

    @property
    def inside(self) -> bool:
        """Whether they lie in a layer; else they may stay unrounded, which is the last of the grids."""
        return self.matrices[0].inside

    def with_grid(self, grid: Spec) -> tuple[Entry, ...]:
        """The entries of the matrices on a grid."""
        coded = None if grid.unrounded else grid
        return tuple(replace(matrix.entry, grid=coded) for matrix in self.matrices)


@dataclass(frozen=True)
class Destination:
    """The format that the result is written in, and the runtime that is to read it.

    target: None where the runtime is not known. machine: what it runs on.
    """

    format: Format
    config: Mapping[str, Any]
    target: Target | None
    machine: Machine

    def refusal(self, entries: Sequence[Entry]) -> tuple[str, str | None] | None:
        """Why the format or the runtime refuses these entries, and a way out; None if neither does."""
        if refused := self.format.refuses(entries, self.config):
            return refused
        if self.target is not None:
            found = violations(self.target, self.format.name, entries, self.config, self.machine)
            if found:
                return f"{self.target.title} does not load this: {found[0]}", found[0].by_hand or None
        return None

    def may_be_lost(self, entry: Entry, grid: Spec) -> bool:
        """Whether the runtime, or without a named one any that reads the format, refuses a matrix for its codes."""
        coded = replace(entry, grid=grid)
        if self.target is not None or self.format.refuses([coded], self.config):
            return self.refusal([coded]) is not None
        readers = [target for target in targets().values() if self.format.name in target.formats and target.unasked]
        return any(
            violations(target, self.format.name, [coded], self.config)
            and not violations(target, self.format.name, [replace(entry, grid=None)], self.config)
            for target in readers
        )


@dataclass(frozen=True)
class OfferedGrids:
    """Types of grids to choose from, with the bits and group sizes of those types that leave them open.

    named: patterns of `set`; the types, bits and group sizes they give stay.
    """

    types: Sequence[str]
    bits: Sequence[int]
    group_sizes: Sequence[int]
    named: Patterns

    def grids(self, members: Sequence[MatrixPlan]) -> list[Spec]:
        """Grids for matrices that share one, smallest first: groups that divide their inputs, else whole rows."""
        made = {grid for kind in self._of("type", members) or self.types for grid in self._of_type(kind, members)}
        width = members[0].entry.in_features
        return sorted(made, key=lambda grid: (grid.bits_per_weight(width), grid.name))

    def _of_type(self, name: str, members: Sequence[MatrixPlan]) -> Iterator[Spec]:
        kind, method = grid_types()[name], members[0].method
        if not kind.grouped:
            for width in kind.widths or (method.bits,):
                yield method.model_copy(
                    update={"type": name, "bits": width, "group_size": kind.default_group, "sym": True}
                ).grid
            return
        sizes = self._of("group_size", members) or self.group_sizes
        inputs = {matrix.entry.in_features for matrix in members}
        dividing = [size for size in sizes if size == PER_ROW or not any(width % size for width in inputs)]
        for bits in self._of("bits", members) or self.bits:
            if kind.widths is None or bits in kind.widths:
                for size in dividing or (PER_ROW,):
                    yield method.model_copy(update={"type": name, "bits": bits, "group_size": size}).grid

    def _of(self, option: str, members: Sequence[MatrixPlan]) -> list[Any]:
        """The value of an option that `set` gives one of the members, in a list; empty where `set` gives none."""
        return [
            getattr(matrix.method, option)
            for matrix in members
            if any(option in options and matches(pattern, matrix.module) for pattern, options in self.named.items())
        ][:1]


def matrix_groups(matrices: Sequence[MatrixPlan], offer: OfferedGrids, destination: Destination) -> list[MatrixGroup]:
    """The groups of a model, with the grids that each may have.

    PlanError where no grid fits a group, where every group has one grid only, and where all groups must have the same.
    """
    groups = [_group(members, offer, destination) for members in _sets(matrices, destination)]
    _refuse_unmixed(groups, destination)
    return groups


def outside_groups(matrices: Sequence[MatrixPlan], offer: OfferedGrids, destination: Destination) -> list[MatrixGroup]:
    """Head and embedding, each a group: the grids that it may have, and none; without those that may have no grid."""
    found = []
    for matrix in matrices:
        group = MatrixGroup((matrix,), tuple(offer.grids([matrix])))
        if fitting := [grid for grid in group.grids if not destination.may_be_lost(matrix.entry, grid)]:
            found.append(replace(group, grids=(*fitting, DenseSpec(matrix.entry.source.dtype))))
    return found


def _sets(matrices: Sequence[MatrixPlan], destination: Destination) -> Iterable[list[MatrixPlan]]:
    """Matrices that share a grid: those that the runtime fuses, and the same matrix of all experts of a layer."""
    wholes: dict[str, str] = {}
    if destination.target is not None and destination.target.fuses:
        joined = fused(matrix.entry for matrix in matrices)
        wholes = {entry.module: name for name, members in joined.items() for entry in members}
    sets: dict[str, list[MatrixPlan]] = {}
    for matrix in matrices:
        alone = matrix.module if matrix.expert is None else re.sub(r"(?<=\.experts\.)\d+", "*", matrix.module)
        sets.setdefault(wholes.get(matrix.module, alone), []).append(matrix)
    return sets.values()


def _group(members: Sequence[MatrixPlan], offer: OfferedGrids, destination: Destination) -> MatrixGroup:
    group = MatrixGroup(tuple(members), tuple(offer.grids(members)))
    refusals = {grid: destination.refusal(group.with_grid(grid)) for grid in group.grids}
    fitting = tuple(grid for grid, refused in refusals.items() if refused is None)
    if not fitting:
        raise PlanError(*next(refused for refused in refusals.values() if refused is not None))
    return replace(group, grids=fitting)


def _refuse_unmixed(groups: Sequence[MatrixGroup], destination: Destination) -> None:
    """PlanError unless groups may have different grids; tried with one group on its last grid, others on the first."""
    several = next((group for group in groups if len(group.grids) > 1), None)
    if several is None:
        raise PlanError(
            "there is only one grid for each matrix, so nothing is to be chosen",
            "offer more: `llmcompress fit` takes several --type, --bits and --group-size",
        )
    low, high = several.grids[0], several.grids[-1]
    others = [group for group in groups if group is not several and low in group.grids]
    mixed = [*several.with_grid(high), *(entry for group in others for entry in group.with_grid(low))]
    refused = destination.refusal(mixed) if others else None
    if refused is not None:
        raise PlanError(f"widths cannot be mixed: {refused[0]}", "use another --format or --target")


def sized(group: MatrixGroup, grid: Spec, format_: Format) -> int:
    """Bytes of a group's tensors in a format."""
    entries = group.with_grid(grid)
    return sum(spec.nbytes for entry in entries for spec in (format_.layout(entry) if entry.grid else [entry.source]))


def stored_bits(group: MatrixGroup, grid: Spec) -> int:
    """Bits of a group's codes, scales and zero points."""
    return round(
        sum(
            entry.out_features * entry.in_features * grid.bits_per_weight(entry.in_features)
            for entry in group.with_grid(grid)
        )
    )
