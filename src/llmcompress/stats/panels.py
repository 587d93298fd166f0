"""Sums whose panels are shared out to ranks: each number is added up by one rank, over all tokens in order."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from llmcompress.workers import Part, Workers


@runtime_checkable
class Panelled(Protocol):
    """A sum [in, in] that is cut into panels. part: the panels that this process adds up."""

    part: Part

    def views(self, number: int) -> list[Tensor]:
        """The panels of the sum that belong to part `number`."""
        ...


def owners(costs: Sequence[int], parts: int) -> list[int]:
    """The part that each panel belongs to: the costliest panel first, each to the part with least to do so far."""
    load, chosen = [0] * parts, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        chosen[number] = load.index(min(load))
        load[chosen[number]] += costs[number]
    return chosen


def complete(sums: Sequence[Panelled], workers: Workers) -> None:
    """Copy into the sums, in place, the panels that other ranks have added up."""
    if not sums or sums[0].part.of == 1:
        return
    own = [item.views(item.part.number) for item in sums]
    for source, panels in enumerate(workers.all_gather_each(own)):
        for item, found in zip(sums, panels, strict=True):
            views = item.views((item.part.number + source - workers.rank) % item.part.of)
            for view, values in zip(views, found, strict=True):
                view.copy_(values)
