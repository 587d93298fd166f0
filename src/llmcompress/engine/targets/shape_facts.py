"""Facts about the shape that a linear has on one device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmcompress.engine.targets.facts import SKIP, SKIP_BY_HAND, DeviceLinear, Fact, LoadCase, Violation
from llmcompress.formats.entry_checks import quantised
from llmcompress.formats.schemes import PACKED, kind


@dataclass(frozen=True)
class Multiples(Fact):
    """The numbers of outputs and inputs on a device are multiples of these, of experts or of all other linears.

    The fact is about kernels for 16-bit inputs: linears with rounded inputs run by other kernels. types: of grids, all
    if there are none.
    """

    outputs: int
    inputs: int
    experts: bool = False
    types: tuple[str, ...] = ()

    def violations(self, case: LoadCase) -> list[Violation]:
        ragged = [
            shard
            for shard in case.shards
            if shard.expert == self.experts
            and shard.entries[0].inputs is None
            and self._of_type(shard)
            and (sum(shard.rows) % self.outputs or shard.inputs % self.inputs)
        ]
        return _left_out(self.why, ragged, case, lambda shard: f"{sum(shard.rows)} x {shard.inputs}")

    def _of_type(self, shard: DeviceLinear) -> bool:
        grid = shard.entries[0].grid
        return not self.types or (grid is not None and grid.type in self.types)


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
            SKIP_BY_HAND if some else "use --format dense",
            dict.fromkeys(names, SKIP) if some else {},
            f"leave {'it' if len(names) == 1 else f'these {len(names)} matrices'} unquantised",
        )
    ]
