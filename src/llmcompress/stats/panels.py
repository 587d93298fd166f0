"""Sums whose panels are added up by different ranks, so that every number is the sum of all tokens in order."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from llmcompress.workers import Part, Workers


class Panelled(Protocol):
    """A sum [in, in]. part: the one that is added up here."""

    part: Part

    def views(self, number: int) -> list[Tensor]:
        """Those panels of the sum that make part `number`."""
        ...


def owners(costs: Sequence[int], parts: int) -> list[int]:
    """Which part each panel belongs to: dear ones first, each to the part that has least to do."""
    load, chosen = [0] * parts, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        chosen[number] = load.index(min(load))
        load[chosen[number]] += costs[number]
    return chosen


def complete(sums: Sequence[Panelled], workers: Workers) -> None:
    """Put into sums, in place, the panels that other ranks have added up."""
    if not sums or sums[0].part.of == 1:
        return
    own = [item.views(item.part.number) for item in sums]
    for source, panels in enumerate(workers.all_gather_each(own)):
        for item, found in zip(sums, panels, strict=True):
            views = item.views((item.part.number + source - workers.rank) % item.part.of)
            for view, values in zip(views, found, strict=True):
                view.copy_(values)
