"""Codebooks: a table of float16 values for each output row, by weighted k-means in one dimension.

SqueezeLLM (arXiv:2306.07629, section 4.1) with the weights that the caller gives each input channel. A row is sorted
once; sums over any stretch of it are differences of cumulative ones. Lloyd's algorithm alone ends in poor local optima
where weights differ as much as those of channels do (10 to 30% above the least error), so dynamic programming begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from llmcompress.grids.base import CodebookSpec
from llmcompress.grids.blocks import between, float16
from llmcompress.grids.integer import positive

_BORDERS = 128  # places of a row at which dynamic programming may end a stretch
_ROUNDS = 50  # of Lloyd's algorithm; most rows stop moving before
_ROWS = 16  # at once: what dynamic programming compares stays in the cache


@dataclass(frozen=True)
class CodebookGrid:
    """Fitted grid of a matrix [out, in = width]. values [out, levels] float32 holding float16, ascending in a row."""

    spec: CodebookSpec
    width: int
    values: Tensor

    offset: ClassVar[None] = None  # what is added to scale * level

    @property
    def table(self) -> Tensor:
        """Levels of the codes [out, levels]: the values themselves."""
        return self.values

    @property
    def scale(self) -> Tensor:
        """One for each row [out, 1]."""
        return torch.ones_like(self.values[:, :1])

    @property
    def group_index(self) -> Tensor:
        """[in] int64: the group of each input channel, of which there is one."""
        return torch.zeros(self.width, dtype=torch.int64, device=self.values.device)

    def levels(self, codes: Tensor) -> Tensor:
        """Values float32 of codes [out, in]."""
        return self.values.gather(1, codes.long())

    def codes(self, levels: Tensor) -> Tensor:
        """Codes uint8 of the values [out, in] nearest to `levels`."""
        return torch.searchsorted(between(self.values).contiguous(), levels.contiguous(), right=True).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Values float32 of codes uint8 [out, in]."""
        return self.levels(codes)

    def encode(self, weight: Tensor) -> Tensor:
        """Nearest codes uint8 of a whole matrix [out, in]."""
        return self.codes(weight)

    def stored(self) -> dict[str, Tensor]:
        """Tensors that tell this grid from others of its spec, in small types; `restored` takes them back."""
        return {"width": torch.tensor(self.width), "values": self.values.to(torch.float16)}

    @classmethod
    def restored(cls, spec: CodebookSpec, *, width: Tensor, values: Tensor) -> "CodebookGrid":
        return cls(spec, int(width), values.to(torch.float32))

    def to(self, device: torch.device | str) -> "CodebookGrid":
        """The same grid on another device."""
        return replace(self, values=self.values.to(device))

    def rows(self, index: slice | Tensor) -> "CodebookGrid":
        """The grid of some output rows."""
        return replace(self, values=self.values[index])

    @classmethod
    def stacked(cls, grids: "Sequence[CodebookGrid]") -> "CodebookGrid":
        """The grid of matrices whose rows follow one another."""
        return replace(grids[0], values=torch.cat([grid.values for grid in grids]))


def fit(weight: Tensor, spec: CodebookSpec, importance: Tensor | None = None) -> CodebookGrid:
    """Tables for weight [out, in] float32 that lose little squared error, channels weighted by importance [in]."""
    width = weight.shape[1]
    weigh = positive(torch.ones(width, device=weight.device) if importance is None else importance.to(torch.float32))
    parts = torch.split(weight, _ROWS)
    values = torch.cat([k_means(part, weigh, spec.levels) for part in parts])
    return CodebookGrid(spec, width, float16(values.to(torch.float32)))


class _Sorted(NamedTuple):
    """Rows in ascending order [rows, in] float64, and cumulative sums [rows, in + 1] of 1, w and w^2 times weights."""

    values: Tensor
    mass: Tensor
    first: Tensor
    second: Tensor


def k_means(weight: Tensor, weigh: Tensor, count: int) -> Tensor:
    """Centres float64 [rows, count], ascending, of weight [rows, in] with the weights weigh [in] > 0.

    The best partition whose borders are among _BORDERS of a row's places, by dynamic programming, which Lloyd's
    algorithm then moves to any place. Rows of no more weights are solved exactly.
    """
    values, order = weight.to(torch.float64).sort(dim=1)
    mass = weigh.to(torch.float64)[order]
    rows = _Sorted(values, *(_summed(part) for part in (mass, mass * values, mass * values.square())))
    return _settled(rows, _partitioned(rows, _candidates(values, mass), count))


def _candidates(values: Tensor, mass: Tensor) -> Tensor:
    """Places [rows, borders] int64, ascending from 0 to in: all there are, or _BORDERS.

    Those are spread by the cube root of the density of the weights, as many centres would be (Panter and Dite, 1951).
    """
    size = values.shape[1]
    if size <= _BORDERS:
        return torch.arange(size + 1, device=values.device).expand(values.shape[0], -1)
    gaps = values.diff(dim=1)
    width = torch.nn.functional.pad(gaps, (1, 0)) + torch.nn.functional.pad(gaps, (0, 1))
    total = (mass * width.square()).pow(1 / 3).cumsum(dim=1)
    shares = torch.arange(1, _BORDERS, dtype=torch.float64, device=values.device) / _BORDERS
    inner = torch.searchsorted(total, total[:, -1:] * shares)
    return torch.nn.functional.pad(torch.nn.functional.pad(inner, (1, 0)), (0, 1), value=size)


def _partitioned(rows: _Sorted, places: Tensor, count: int) -> Tensor:
    """Centres [rows, count] of the partition into stretches between `places` that loses least."""
    mass, first, second = (part.gather(1, places) for part in (rows.mass, rows.first, rows.second))

    def between_places(part: Tensor) -> Tensor:  # [rows, end, begin]
        return part.unsqueeze(2) - part.unsqueeze(1)

    inside = between_places(mass)
    cost = between_places(second) - between_places(first).square_().div_(inside.clamp_min(1e-300))
    cost.masked_fill_(places.unsqueeze(2) < places.unsqueeze(1), torch.inf).clamp_min_(0)
    cost = cost.to(torch.float32)  # of which differences between partitions are all that matters
    least = [cost[:, :, 0]]
    for _ in range(count - 1):
        least.append((cost + least[-1].unsqueeze(1)).amin(dim=2))
    place = torch.full_like(places[:, :1], places.shape[1] - 1)
    edges = [place]
    for before in least[-2::-1]:
        ending = cost.gather(1, place.unsqueeze(2).expand(-1, -1, cost.shape[2]))[:, 0]
        place = (ending + before).argmin(dim=1, keepdim=True)
        edges.append(place)
    edges.append(torch.zeros_like(place))
    chosen = torch.cat(edges[::-1], dim=1)
    masses, firsts = mass.gather(1, chosen).diff(dim=1), first.gather(1, chosen).diff(dim=1)
    start = rows.values.gather(1, places.gather(1, chosen[:, :-1]).clamp_max(rows.values.shape[1] - 1))
    return torch.where(masses > 0, firsts / masses, start)


def _summed(part: Tensor) -> Tensor:
    return torch.nn.functional.pad(part.cumsum(dim=1), (1, 0))


def _edges(rows: _Sorted, centres: Tensor) -> Tensor:
    """Where in its sorted row each centre's stretch begins, and where the last one ends [rows, count + 1]."""
    inner = torch.searchsorted(rows.values, between(centres))
    return torch.nn.functional.pad(torch.nn.functional.pad(inner, (1, 0)), (0, 1), value=rows.values.shape[1])


def _settled(rows: _Sorted, centres: Tensor) -> Tensor:
    """Centres after Lloyd's algorithm; one that has lost all its weights stays where it is."""
    before = None
    for _ in range(_ROUNDS):
        edges = _edges(rows, centres)
        if before is not None and torch.equal(edges, before):
            break
        before = edges
        mass, first = (part.gather(1, edges).diff(dim=1) for part in (rows.mass, rows.first))
        centres = torch.where(mass > 0, first / mass, centres).cummax(dim=1).values
    return centres
