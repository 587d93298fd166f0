"""How llama-quantize takes eight weights, or four, to a point of a table, to the bit: to the nearest of a few around.

Arrays are [units, 8 or 4, groups] of numpy; digits are whole numbers below a base. Source: the rules of ggml 0.25, its
x86-64 build.
"""

from dataclasses import dataclass

import numpy as np

from llmcompress.grids.compat_search import Array, F, total


@dataclass(frozen=True)
class PointTable:
    """digits [points, unit] below `base`. place [base ** unit]: which point digits are, read as a number; -1 - n where
    they are none.

    around [n, most]: the points to look at then, of which there are counts [n].
    """

    digits: Array
    base: int
    place: Array
    around: Array
    counts: Array

    @classmethod
    def of(cls, digits: Array, base: int, distances: int) -> "PointTable":
        """distances: how many of the least distances of points there are to look at."""
        powers = base ** np.arange(digits.shape[1])
        every = np.arange(base ** digits.shape[1])[:, None] // powers % base
        place = np.full(len(every), -1)
        place[digits @ powers] = np.arange(len(digits))
        missing = np.nonzero(place < 0)[0]
        lists = []
        for number in missing:
            distance = np.square(digits - every[number]).sum(1)
            order = np.argsort(distance, kind="stable")
            lists.append(order[distance[order] <= np.unique(distance)[:distances][-1]])
        around = np.full((len(lists), max(map(len, lists))), -1)
        for n, found in enumerate(lists):
            around[n, : len(found)] = found
        place[missing] = -1 - np.arange(len(missing))
        return cls(digits, base, place, around, np.array([len(found) for found in lists]))

    @property
    def unit(self) -> int:
        """How many weights are a point."""
        return int(self.digits.shape[1])

    def nearest(self, digits: Array, x: Array, weigh: Array, values: Array) -> tuple[Array, Array]:
        """Digits of points, and which units [units, groups] had none.

        values [units, base, groups]: what digits stand for; an error e costs weigh * e * e.
        """
        place = self.place[np.tensordot(self.base ** np.arange(self.unit), digits, axes=(0, 1))]
        off: Array = place < 0
        unit, group = np.nonzero(off)
        number = -1 - place[off]
        order = np.argsort(-self.counts[number], kind="stable")  # those that have many points to look at come first
        unit, group, number = unit[order], group[order], number[order]
        own_x, own_weigh, own_values = (item[unit, :, group] for item in (x, weigh, values))
        best, chosen = np.full(len(unit), np.finfo(F).max), np.full(len(unit), -1)
        for n, left in enumerate(len(number) - np.cumsum(np.bincount(self.counts[number]))):
            if not left:
                break
            point = self.around[number[:left], n]
            delta = np.take_along_axis(own_values[:left], self.digits[point], 1) - own_x[:left]
            distance = total((own_weigh[:left] * delta * delta).T)
            better = distance < best[:left]
            np.copyto(best[:left], distance, where=better)
            np.copyto(chosen[:left], point, where=better)
        found = digits.copy()
        found[unit, :, group] = self.digits[chosen]
        return found, off
