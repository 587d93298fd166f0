"""The choice of a variant of `csrc/matmul.cu` and its grid: the cheapest by a simple model of a multiprocessor.

Units of work are shared out evenly, so that no multiprocessor waits for another; or, where that is cheaper, every tile
of outputs is one block's, so that no sums need to be brought together, or that of a few.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from llmcompress.kernels.tensor_checks import RESERVED, begins_early, ceil, shared_limit
from llmcompress.kernels.tiles import INPUTS, OUTPUTS, TileSpec

SHAPES = ((1, 2, 4), (1, 4, 2), (1, 8, 1), (2, 4, 2), (2, 8, 1), (4, 8, 1), (8, 8, 1))
"""Tiles of 8 rows, warps along outputs, warps along inputs."""
MOST_STAGES = 6

# what an H200 offers one multiprocessor, per ns; only the order of costs matters
_FROM_MEMORY = 4300 / 132  # bytes, the rate of a copy
_FROM_CACHE = 5500 / 132  # bytes
_PRODUCTS = 0.62 * 1.75  # instructions m16n8k16
_LATENCY = 900.0  # ns until bytes asked for are there
_JOIN_BEGINS = 600.0  # ns until a block's sums, and then its mark, have reached the L2 cache and the last block knows
_JOIN_ROUND = 250.0  # ns of a round of loads from the L2 cache
_TO_ONE = 100.0  # bytes per ns from the L2 cache to one multiprocessor
_LOADS = 8  # of 16 bytes that a thread has under way while it joins (csrc/matmul_sums.cuh)


@dataclass(frozen=True)
class Problem:
    """x [rows, inputs] times a matrix [outputs, inputs]."""

    rows: int
    outputs: int
    inputs: int
    spec: TileSpec


@dataclass(frozen=True)
class Partition:
    """A variant (macros of matmul.cu, in lower case) and how many blocks share the units of each block of rows."""

    problem: Problem
    tiles: int
    warps_n: int
    warps_k: int
    stages: int
    blocks: int
    slots: int

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        names = ("tiles", "warps_n", "warps_k", "stages", "blocks")
        return tuple((name.upper(), getattr(self, name)) for name in names)

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k

    @property
    def row_blocks(self) -> int:
        return ceil(self.problem.rows, 8 * self.tiles)

    @property
    def columns(self) -> int:
        """Tiles of outputs."""
        return ceil(self.problem.outputs, OUTPUTS * self.warps_n)

    @property
    def depth(self) -> int:
        """Units of a tile of outputs."""
        return ceil(self.problem.inputs, INPUTS * self.warps_k)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.slots, self.row_blocks, 1

    @property
    def stage_bytes(self) -> int:
        """Of one unit: codes, scales and zero points of all warps, and x."""
        return self.weight_bytes + 2 * INPUTS * self.warps_k * 8 * self.tiles

    @property
    def weight_bytes(self) -> int:
        return self.warps_n * self.warps_k * self.problem.spec.block_bytes

    @property
    def shared(self) -> int:
        sums = 4 * self.warps_k * 8 * self.tiles * (OUTPUTS * self.warps_n + 4)
        return self.stages * self.stage_bytes + sums + 16

    @property
    def partial(self) -> int:
        """Floats of the sums that blocks leave for one another."""
        return (
            0
            if self.slots == self.columns
            else 2 * self.slots * self.row_blocks * 8 * self.tiles * OUTPUTS * self.warps_n
        )

    @property
    def sharers(self) -> int:
        """The most blocks that have units of one tile of outputs."""
        least, longer = divmod(self.columns * self.depth, self.slots)

        def block_of(unit: int) -> int:
            in_longer = longer * (least + 1)
            return unit // (least + 1) if unit < in_longer else longer + (unit - in_longer) // least

        begins = range(0, self.columns * self.depth, self.depth)
        return max(block_of(begin + self.depth - 1) - block_of(begin) + 1 for begin in begins)

    @property
    def counters(self) -> int:
        return self.row_blocks * self.columns

    def cost(self, multiprocessors: int) -> float:
        """Expected ns."""
        grid = self.slots * self.row_blocks
        waves = ceil(grid, multiprocessors * self.blocks)
        beside = min(self.blocks, ceil(grid, multiprocessors))  # blocks that share a multiprocessor
        under_way = beside * (self.stages - 1) * self.weight_bytes
        x_bytes = 2 * INPUTS * self.warps_k * min(self.problem.rows, 8 * self.tiles)
        products = self.warps_n * self.warps_k * (INPUTS // 16) * 2 * self.tiles
        unit = max(
            self.weight_bytes / self.row_blocks / min(_FROM_MEMORY, under_way / _LATENCY),
            (self.weight_bytes + x_bytes) / _FROM_CACHE,
            products / _PRODUCTS,
        )
        units = ceil(self.columns * self.depth, self.slots)
        return waves * (_LATENCY + units * beside * unit) + self.join_cost

    @property
    def join_cost(self) -> float:
        """Expected ns that the last block of a tile takes to add up the sums of all."""
        if not self.partial:
            return 0.0
        pieces = min(self.problem.rows, 8 * self.tiles) * OUTPUTS * self.warps_n // 4  # of 16 bytes
        each = ceil(pieces, self.threads)
        rate = min(_TO_ONE, _FROM_CACHE * 132 / self.counters)
        loaded = max(16 * pieces * self.sharers / rate, ceil(each * self.sharers, _LOADS) * _JOIN_ROUND)
        return _JOIN_BEGINS + loaded


@cache
def best(problem: Problem, architecture: str, multiprocessors: int) -> Partition:
    """The cheapest way for a device; the same one whenever it is asked for.

    Of equal ones, that whose next launch finds room beside it, if it may begin early, then that whose tiles are shared
    by the fewest blocks.
    """
    plans = candidates(problem, architecture, multiprocessors)
    early = begins_early(architecture)
    return min(plans, key=lambda plan: (plan.cost(multiprocessors), -plan.blocks * early, plan.sharers, -plan.stages))


def candidates(problem: Problem, architecture: str, multiprocessors: int) -> Iterator[Partition]:
    """All ways that fit a device."""
    for plan in variants(problem, architecture):
        most = plan.columns * plan.depth
        alone, even = (max(1, min(multiprocessors * n // plan.row_blocks, most)) for n in (1, plan.blocks))
        yield from (replace(plan, slots=slots) for slots in {alone, even})
        for sharers in range(1, max(1, even // plan.columns) + 1):
            yield replace(plan, slots=plan.columns * sharers)


def variants(problem: Problem, architecture: str) -> Iterator[Partition]:
    """All variants of the kernel that fit a device, on one block each."""
    limit = shared_limit(architecture)
    for tiles, warps_n, warps_k in SHAPES:
        if tiles == 8 and problem.spec.group < INPUTS:  # too many registers
            continue
        for blocks in (2, 1) if tiles == 1 or (tiles == 2 and problem.spec.bits < 8) else (1,):  # as registers allow
            plan = Partition(problem, tiles, warps_n, warps_k, 2, blocks, 1)
            spare = (limit + RESERVED) // blocks - RESERVED - plan.shared
            if spare >= 0:
                yield replace(plan, stages=min(MOST_STAGES, 2 + spare // plan.stage_bytes))
