"""Which matrices must share a grid, and which grids each may have: by the format, the runtime, and the widths."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmcompress.engine.plan.matrix_options import matches
from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.targets.table import Target
from llmcompress.engine.targets.verdicts import violations
from llmcompress.errors import PlanError
from llmcompress.formats.base import Entry, Format
from llmcompress.formats.entry_checks import fused
from llmcompress.grids.base import PER_ROW
from llmcompress.grids.integer import IntegerSpec

Patterns = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Item:
    """Matrices that get the same grid, and the grids to choose from, fewest bits first."""

    matrices: tuple[MatrixPlan, ...]
    grids: tuple[IntegerSpec, ...]

    def with_grid(self, grid: IntegerSpec) -> tuple[Entry, ...]:
        """Their entries on a grid."""
        return tuple(replace(matrix.entry, grid=grid) for matrix in self.matrices)


@dataclass(frozen=True)
class Rules:
    """Who writes the result and who reads it. target: None where nothing is known of that. tp: its devices."""

    format: Format
    config: Mapping[str, Any]
    target: Target | None
    tp: int

    def refusal(self, entries: Sequence[Entry]) -> tuple[str, str | None] | None:
        """Why these cannot be, and a way out; None if they can."""
        if refused := self.format.refuses(entries, self.config):
            return refused
        if self.target is not None:
            found = violations(self.target, self.format.name, entries, self.config, self.tp)
            if found:
                return f"{self.target.title} does not load {found[0]}", found[0].by_hand or None
        return None


@dataclass(frozen=True)
class Offer:
    """Widths in bits and group sizes to choose from. named: patterns of `set`, whose bits and group sizes stay."""

    bits: Sequence[int]
    group_sizes: Sequence[int]
    named: Patterns

    def grids(self, members: Sequence[MatrixPlan]) -> list[IntegerSpec]:
        """Those for matrices that share one, smallest first: of groups that divide their inputs, else of whole rows."""
        bits = self._of("bits", members) or self.bits
        sizes = self._of("group_size", members) or self.group_sizes
        widths = {matrix.entry.in_features for matrix in members}
        dividing = [size for size in sizes if size == PER_ROW or not any(width % size for width in widths)]
        made = {IntegerSpec(width, size, members[0].method.sym) for width in bits for size in dividing or (PER_ROW,)}
        return sorted(made, key=lambda grid: (grid.bits, -grid.width(1 << 31)))

    def _of(self, option: str, members: Sequence[MatrixPlan]) -> list[int]:
        """What `set` says of an option of one of the members."""
        return [
            getattr(matrix.method, option)
            for matrix in members
            if any(option in options and matches(pattern, matrix.module) for pattern, options in self.named.items())
        ][:1]


def items_of(matrices: Sequence[MatrixPlan], offer: Offer, rules: Rules) -> list[Item]:
    """The items of a model, with the grids that each may have.

    PlanError where nothing can be chosen, as no grid fits or only one does, and where all must have the same.
    """
    items = [_item(members, offer, rules) for members in _sets(matrices, rules)]
    _refuse_unmixed(items, rules)
    return items


def _sets(matrices: Sequence[MatrixPlan], rules: Rules) -> Iterable[list[MatrixPlan]]:
    """Matrices that share a grid: what the runtime runs as one, and the same matrix of all experts of a layer."""
    wholes: dict[str, str] = {}
    if rules.target is not None and rules.target.fuses:
        joined = fused(matrix.entry for matrix in matrices)
        wholes = {entry.module: name for name, members in joined.items() for entry in members}
    sets: dict[str, list[MatrixPlan]] = {}
    for matrix in matrices:
        alone = matrix.module if matrix.expert is None else re.sub(r"(?<=\.experts\.)\d+", "*", matrix.module)
        sets.setdefault(wholes.get(matrix.module, alone), []).append(matrix)
    return sets.values()


def _item(members: Sequence[MatrixPlan], offer: Offer, rules: Rules) -> Item:
    item = Item(tuple(members), tuple(offer.grids(members)))
    refusals = {grid: rules.refusal(item.with_grid(grid)) for grid in item.grids}
    fitting = tuple(grid for grid, refused in refusals.items() if refused is None)
    if not fitting:
        raise PlanError(*next(refused for refused in refusals.values() if refused is not None))
    return replace(item, grids=fitting)


def _refuse_unmixed(items: Sequence[Item], rules: Rules) -> None:
    """PlanError unless items may have different grids: one with its last grid, others with the first, are tried."""
    several = next((item for item in items if len(item.grids) > 1), None)
    if several is None:
        raise PlanError("there is only one grid for each matrix, so nothing is to be chosen", "offer more --bits")
    low, high = several.grids[0], several.grids[-1]
    others = [item for item in items if item is not several and low in item.grids]
    mixed = [*several.with_grid(high), *(entry for item in others for entry in item.with_grid(low))]
    refused = rules.refusal(mixed) if others else None
    if refused is not None:
        raise PlanError(f"widths cannot be mixed: {refused[0]}", "use another --format or --target")


def sized(item: Item, grid: IntegerSpec, format_: Format) -> int:
    """Bytes of an item's tensors in a format."""
    return sum(spec.nbytes for entry in item.with_grid(grid) for spec in format_.layout(entry))


def stored_bits(item: Item, grid: IntegerSpec) -> int:
    """Bits of an item's codes, scales and zero points."""
    return round(
        sum(
            entry.out_features * entry.in_features * grid.bits_per_weight(entry.in_features)
            for entry in item.with_grid(grid)
        )
    )
