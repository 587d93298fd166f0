"""Codebooks: a table of float16 values for each output row, by weighted k-means in one dimension.

SqueezeLLM (arXiv:2306.07629, section 4.1) with the weights that the caller gives each input channel. A row is sorted
once; sums over any stretch of it are differences of cumulative ones. Lloyd's algorithm alone ends in poor local optima
where weights differ as much as those of channels do (10 to 30% above the least error), so dynamic programming begins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from llmcompress.errors import RecipeError
from llmcompress.grids.base import PER_ROW, GridRequest, Spec
from llmcompress.grids.coded import Coded, Grid
from llmcompress.grids.errors import positive
from llmcompress.grids.grid_type import Fitting, GridType
from llmcompress.grids.scales import between, float16, gains
from llmcompress.lazy import Tensor, torch

CODEBOOK_BITS = (2, 3, 4)
_BORDERS = 128  # places of a row at which dynamic programming may end a stretch
_ROUNDS = 50  # of Lloyd's algorithm; most rows stop moving before
_ROWS = 16  # at once: what dynamic programming compares stays in the cache


@dataclass(frozen=True)
class CodebookSpec(Spec):
    """A table of 2^bits float16 values for each output row (SqueezeLLM, arXiv:2306.07629)."""

    bits: int

    type: ClassVar[str] = "codebook"
    symmetric: ClassVar[bool] = True
    group_size: ClassVar[int] = PER_ROW
    rounds_at_once: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.bits not in CODEBOOK_BITS:
            raise RecipeError(
                f"codebooks have {', '.join(map(str, CODEBOOK_BITS))} bits, not {self.bits}", "choose one of them"
            )

    @property
    def name(self) -> str:
        return f"codebook{self.bits}-row"

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight, the table included."""
        return self.bits + 16 * self.levels / in_features


@dataclass(frozen=True)
class CodebookGrid(Grid):
    """Fitted grid of a matrix [out, in = width]. values [out, levels] float32 holding float16, ascending in a row."""

    spec: CodebookSpec
    width: int
    values: Tensor

    by_row: ClassVar[Mapping[str, str | None]] = {"values": "float16"}

    @property
    def table(self) -> Tensor:
        return self.values

    @property
    def scale(self) -> Tensor:
        """One for each row [out, 1]."""
        return torch.ones_like(self.values[:, :1])

    @property
    def group_index(self) -> Tensor:
        return torch.zeros(self.width, dtype=torch.int64, device=self.values.device)

    def levels(self, codes: Tensor) -> Tensor:
        return self.values.gather(1, codes.long())

    def codes(self, levels: Tensor) -> Tensor:
        return torch.searchsorted(between(self.values).contiguous(), levels.contiguous(), right=True).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        return self.levels(codes)

    def encode(self, weight: Tensor) -> Tensor:
        return self.codes(weight)

    def stored(self) -> dict[str, Tensor]:
        return {"width": torch.tensor(self.width), **super().stored()}

    def refit(self, codes: Tensor, hessian: Tensor, gradient: Tensor, scale_dtype: torch.dtype) -> Coded:
        """Better tables by least squares; rows that would not gain keep theirs.

        With C the indicator of a row's codes [in, levels], a step d of its values gains 2 d^T C^T H (w - q)
        - d^T (C^T H C) d. The codes of a row whose new values are in another order are renumbered.
        """
        rows, levels = self.values.shape
        index = codes.long()
        slope = gradient.new_zeros(rows, levels).scatter_add_(1, index, gradient)
        square = gradient.new_zeros(rows, levels, levels)
        for level in range(levels):
            square[:, level].scatter_add_(1, index, (codes == level).to(hessian.dtype) @ hessian)
        ridge = 1e-5 * square.diagonal(dim1=1, dim2=2).mean(dim=1).clamp_min(1e-30)  # values that no code stands for
        eye = torch.eye(levels, device=codes.device)
        step = torch.linalg.solve(square + ridge[:, None, None] * eye, slope)
        values = float16(torch.where(torch.isfinite(step), self.values + step, self.values))
        values = torch.where((gains(square, slope, values - self.values) > 0)[:, None], values, self.values)
        ascending, order = values.sort(dim=1, stable=True)
        places = torch.empty_like(order).scatter_(1, order, torch.arange(levels, device=codes.device).expand_as(order))
        return Coded(places.gather(1, index).to(torch.uint8), replace(self, values=ascending))


class Codebooks(GridType):
    """A table of values for each output row."""

    name = "codebook"
    place = 3
    values = "a table for each row"
    pattern = r"codebook(\d)-row"
    widths = CODEBOOK_BITS
    clips = False
    formats = ("codebook",)

    def named(self, found: re.Match[str]) -> Spec:
        return CodebookSpec(int(found[1]))

    def spec(self, asked: GridRequest) -> Spec:
        return CodebookSpec(asked.bits)

    def specs(self) -> list[Spec]:
        return [CodebookSpec(bits) for bits in CODEBOOK_BITS]

    def fit(self, weight: Tensor, spec: CodebookSpec, how: Fitting) -> CodebookGrid:
        return fit(weight, spec, how.importance)

    def restored(self, spec: CodebookSpec, width: int, parts: Mapping[str, Tensor]) -> CodebookGrid:
        return CodebookGrid(spec, width, parts["values"].to(torch.float32))


GRID = Codebooks()


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
