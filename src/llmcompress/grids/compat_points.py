"""How llama-quantize takes eight weights to a point of a table, to the bit: to the nearest of a few around them.

Arrays are [units, 8, groups] of numpy; digits are 0 to 2. Source: the rules of ggml 0.25, its x86-64 build.
"""

from dataclasses import dataclass

import numpy as np

from llmcompress.grids.compat_search import Array, F, total

_POWERS = 3 ** np.arange(8)


@dataclass(frozen=True)
class EightsTable:
    """digits [points, 8]. place [3 ** 8]: which point eight digits are, read as a number; -1 - n where they are none.

    around [n, most]: the points to look at then, of which there are counts [n].
    """

    digits: Array
    place: Array
    around: Array
    counts: Array

    @classmethod
    def of(cls, digits: Array, distances: int) -> "EightsTable":
        """distances: how many of the least distances of points there are to look at."""
        every = np.arange(3**8)[:, None] // _POWERS % 3
        place = np.full(len(every), -1)
        place[digits @ _POWERS] = np.arange(len(digits))
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
        return cls(digits, place, around, np.array([len(found) for found in lists]))

    def nearest(self, digits: Array, x: Array, weigh: Array, values: Array) -> tuple[Array, Array]:
        """Digits of points, and which units [units, groups] had none.

        values [units, 3, groups]: what digits stand for; an error e costs weigh * e * e.
        """
        place = self.place[np.tensordot(_POWERS, digits, axes=(0, 1))]
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
