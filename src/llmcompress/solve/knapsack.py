"""One option of every item under a budget: the multiple-choice knapsack, near its optimum."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple


class Choice(NamedTuple):
    """What an option costs, in units of the budget, and what is lost by taking it."""

    cost: float
    loss: float


def cheapest(options: Sequence[Choice]) -> int:
    """Number of the cheapest option, of several the one that loses least."""
    return min(range(len(options)), key=options.__getitem__)


def choose(items: Sequence[Sequence[Choice]], budget: float) -> list[int]:
    """The number of one option per item, together within `budget`, that lose little in sum.

    Every item begins with its cheapest option. Steps along the lower convex hulls are taken in order of the loss they
    save per unit of cost, which is optimal for every budget that they fill exactly (Everett 1963); what then remains
    is filled with the best single changes that still fit. The loss exceeds the least possible by less than the largest
    step saves. ValueError if not even the cheapest options fit.
    """
    chosen = [cheapest(options) for options in items]
    room = budget - sum(options[number].cost for options, number in zip(items, chosen, strict=True))
    if room < 0:
        raise ValueError(f"the cheapest options cost {-room} more than the budget")
    hulls = [_hull(options) for options in items]
    waiting = [(-_rate(items[item], *hull[:2]), item, 1) for item, hull in enumerate(hulls) if len(hull) > 1]
    heapify(waiting)
    while waiting:
        _, item, place = heappop(waiting)
        options, hull = items[item], hulls[item]
        cost = options[hull[place]].cost - options[hull[place - 1]].cost
        if cost > room:  # an item's later steps start from this one
            continue
        chosen[item], room = hull[place], room - cost
        if place + 1 < len(hull):
            heappush(waiting, (-_rate(options, *hull[place : place + 2]), item, place + 1))
    _fill(items, chosen, room)
    return chosen


def mirrored(items: Sequence[Sequence[Choice]]) -> list[list[Choice]]:
    """The same options with cost and loss exchanged: `choose` then finds the least cost within a loss."""
    return [[Choice(option.loss, option.cost) for option in options] for options in items]


def _rate(options: Sequence[Choice], here: int, there: int) -> float:
    """Loss saved per unit of cost on the way from one option to a costlier one."""
    return (options[here].loss - options[there].loss) / (options[there].cost - options[here].cost)


def _hull(options: Sequence[Choice]) -> list[int]:
    """Options on the lower convex hull of loss over cost, from the cheapest to the one that loses least."""
    hull: list[int] = []
    for number in sorted(range(len(options)), key=options.__getitem__):
        if hull and options[number].loss >= options[hull[-1]].loss:
            continue
        while len(hull) > 1 and _rate(options, hull[-1], number) > _rate(options, hull[-2], hull[-1]):
            hull.pop()
        hull.append(number)
    return hull


def _fill(items: Sequence[Sequence[Choice]], chosen: list[int], room: float) -> None:
    """Spend what is left on the changes that save most, one after the other."""
    while True:
        best: tuple[float, int, int] | None = None
        for item, (options, number) in enumerate(zip(items, chosen, strict=True)):
            for other, option in enumerate(options):
                saved = options[number].loss - option.loss
                if saved > 0 and option.cost - options[number].cost <= room and (best is None or saved > best[0]):
                    best = saved, item, other
        if best is None:
            return
        _, item, other = best
        room -= items[item][other].cost - items[item][chosen[item]].cost
        chosen[item] = other
