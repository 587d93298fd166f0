"""Types of GGUF whose values are rounded eight at a time, to points of a table: IQ2_XXS to IQ3_S.

The magnitudes of eight weights (of four, in types of three bits) are a row of a table. Their signs stand beside it: one
each, or seven for eight, the number of minus signs being even. A value is scale * level, the scale a float16 `d` of 256
weights times an odd whole number of 16 or 32 of them. Tables are those of the gguf package. What is nearest depends on
how errors of neighbours add up: a matrix says what an error costs (QuIP#, arXiv:2402.04396, section 4.1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, ClassVar

from llmcompress.grids.base import Search
from llmcompress.grids.block_type import BlockType
from llmcompress.grids.blocks import BlockGrid, BlockSpec, whole_blocks
from llmcompress.grids.coded import Coded
from llmcompress.grids.grid_type import Fitting
from llmcompress.grids.scales import float16
from llmcompress.hardware import at_once
from llmcompress.lazy import Tensor, torch
from llmcompress.packing.lattice_bytes import LATTICE_BYTES

if TYPE_CHECKING:
    from llmcompress.grids.compat_points import PointTable
    from llmcompress.workers import Workers

UNIT = 8
_CHUNK = 1 << 14  # weights fitted at once: what points gain stays in the cache
_ODD = (1, 31)
_REACHES = tuple(0.7 + 0.05 * i for i in range(11))  # of the largest magnitude of a group, tried for the largest level
_UNITS = tuple(0.7 + 0.05 * i for i in range(13))  # of d, where 1 makes the largest scale the largest multiple
_LEAST_IMPORTANCE = 1e-3  # of the mean: channels that were never active keep a sensible scale


@dataclass(frozen=True)
class LatticeSpec(BlockSpec):
    """quad: whether a row of the table is four magnitudes, not eight. fraction: what the package's numbers of the table
    are divided by. even: whether eight weights have an even number of minus signs.
    """

    quad: bool = False
    fraction: int = 8
    even: bool = False

    type: ClassVar[str] = "lattice"

    def whole(self, multiples: Tensor) -> Tensor:
        """The nearest odd numbers that scales may be."""
        return whole_odd(multiples, self)

    @property
    def together(self) -> int:
        return UNIT


SPECS = {
    spec.name: spec
    for spec in (
        LatticeSpec("IQ2_XXS", 256, 66, 32, 3, multiples=_ODD, even=True),
        LatticeSpec("IQ2_XS", 256, 74, 16, 3, multiples=_ODD, even=True),
        LatticeSpec("IQ2_S", 256, 82, 16, 3, multiples=_ODD),
        LatticeSpec("IQ3_XXS", 256, 98, 32, 4, multiples=_ODD, quad=True, fraction=4, even=True),
        LatticeSpec("IQ3_S", 256, 110, 32, 4, multiples=_ODD, quad=True, fraction=1),
    )
}


def whole_odd(multiples: Tensor, spec: BlockSpec) -> Tensor:
    """The nearest odd numbers in the range of a type's multiples."""
    return ((multiples - 1) / 2).round_().mul_(2).add_(1).clamp_(*(spec.multiples or _ODD))


@dataclass(frozen=True)
class Points:
    """The table of a type: magnitudes [points, 4 or 8] float32.

    values [n]: all levels, ascending; codes are places in it. place [base ** (4 or 8)] int64: which row of the table
    a row of places of magnitudes is, read as digits; -1 for none.
    """

    magnitudes: Tensor
    values: Tensor
    place: Tensor

    @property
    def base(self) -> int:
        return len(self.values) // 2

    def digits(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Of codes: the places of their magnitudes int64, and whether they are negative."""
        negative = codes < self.base
        whole = codes.to(torch.int64)
        return torch.where(negative, self.base - 1 - whole, whole - self.base), negative

    def rows(self, digits: Tensor) -> Tensor:
        """Rows of the table int64 of digits [..., 4 or 8]."""
        powers = self.base ** torch.arange(digits.shape[-1], device=digits.device)
        return self.place.to(digits.device)[(digits * powers).sum(-1)]


@cache
def points(name: str) -> Points:
    """The table of a type by its name."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    spec = SPECS[name]
    magnitudes = torch.from_numpy(kind.grid.reshape(-1, 4 if spec.quad else UNIT).copy()) / spec.fraction
    known = torch.tensor(sorted(set(magnitudes.flatten().tolist())))
    found = Points(magnitudes, torch.cat([-known.flip(0), known]), torch.empty(0))
    digits = torch.searchsorted(known, magnitudes)
    powers = found.base ** torch.arange(digits.shape[1])
    place = torch.full((found.base ** digits.shape[1],), -1, dtype=torch.int64)
    place[(digits * powers).sum(1)] = torch.arange(len(digits))
    return replace(found, place=place)


@cache
def _point_table(name: str) -> PointTable:
    """The table of a type as llama-quantize looks for points in it."""
    from llmcompress.grids.compat_lattice import RULES
    from llmcompress.grids.compat_points import PointTable

    table = points(name)
    digits = torch.searchsorted(table.values[table.base :], table.magnitudes).numpy()
    return PointTable.of(digits, table.base, RULES[name].distances)


@dataclass(frozen=True)
class LatticeGrid(BlockGrid):
    """Fitted grid of a matrix [out, in]; the fields are those of `BlockGrid`, multiples being odd."""

    spec: LatticeSpec

    @property
    def table(self) -> Tensor:
        return points(self.spec.name).values.to(self.d.device)

    def codes(self, levels: Tensor) -> Tensor:
        """Codes uint8 of levels [out, in] that are points."""
        return torch.searchsorted(self.table, levels.contiguous()).to(torch.uint8)

    def encode(self, weight: Tensor) -> Tensor:
        """Codes of the nearest points for weight [out, in], errors counting alike."""
        scale = self.scale.repeat_interleave(self.spec.group_size, dim=1)
        units = torch.where(scale == 0, 0.0, weight / scale).view(-1, UNIT)
        metric = torch.eye(UNIT, device=units.device)
        parts = [nearest(part, metric, self.spec) for part in torch.split(units, _CHUNK // UNIT)]
        return self.codes(torch.cat(parts).view(weight.shape))

    def snapped(self, units: Tensor, metric: Tensor, group: int) -> Tensor:
        return nearest(units, metric, self.spec)

    def numbers(self, codes: Tensor) -> bool:
        return bool((self._rows(codes) >= 0).all())

    def _rows(self, codes: Tensor) -> Tensor:
        """Rows of the table [out, in / (4 or 8)] of codes [out, in]; -1 where these are no point."""
        table = points(self.spec.name)
        digits, negative = table.digits(codes)
        rows = table.rows(digits.view(len(codes), -1, table.magnitudes.shape[1]))
        if self.spec.even:
            odd = negative.view(len(codes), -1, UNIT).sum(-1) % 2 == 1
            rows[odd.repeat_interleave(rows.shape[1] // odd.shape[1], dim=1)] = -1
        return rows

    def gguf_rows(self, codes: Tensor) -> Tensor:
        assert self.multiples is not None
        scales = ((self.multiples - 1) / 2).to(torch.int64)
        _, negative = points(self.spec.name).digits(codes)
        bits = (negative.view(len(codes), -1, UNIT).to(torch.int64) << torch.arange(UNIT, device=codes.device)).sum(-1)
        blocks = self.d.shape
        parts = (part.view(*blocks, -1) for part in (self._rows(codes), bits, scales))
        half = self.d.to(torch.float16).unsqueeze(-1).view(torch.uint8)
        return torch.cat([half, *LATTICE_BYTES[self.spec.name][0](*parts)], dim=-1).flatten(1)


def nearest(units: Tensor, metric: Tensor, spec: LatticeSpec) -> Tensor:
    """Levels [n, 8] of the points nearest to values in units of their scales [n, 8].

    metric [8, 8]: errors e of a row cost e metric e^T.
    """
    if not spec.quad:
        return _nearest(units, metric, spec, _signs(units, metric, even=spec.even))
    first, second = slice(0, 4), slice(4, 8)
    # how the second four make up for the first
    feed = torch.linalg.solve(metric[second, second], metric[second, first])
    signs = _signs(units, metric, even=spec.even)
    alone = metric[first, first] - metric[first, second] @ feed
    levels = _nearest(units[:, first], alone, spec, signs[:, first])
    shifted = units[:, second] + (units[:, first] - levels) @ feed.T
    own = torch.where(shifted < 0, -1.0, 1.0)
    if spec.even:
        wrong = (own.prod(1) != levels.sign().prod(1)).nonzero().squeeze(1)
        cheapest = (shifted[wrong].abs() * metric.diagonal()[second].sqrt()).argmin(1)
        own[wrong, cheapest] *= -1
    return torch.cat([levels, _nearest(shifted, metric[second, second], spec, own)], dim=1)


def _signs(units: Tensor, metric: Tensor, *, even: bool) -> Tensor:
    """Signs [n, 8]: those of the values, but for the cheapest where the number of minus signs has to be even."""
    signs = torch.where(units < 0, -1.0, 1.0)
    if even:
        wrong = (signs.prod(1) < 0).nonzero().squeeze(1)
        cheapest = (units[wrong].abs() * metric.diagonal().sqrt()).argmin(1)
        signs[wrong, cheapest] *= -1
    return signs


def _nearest(units: Tensor, metric: Tensor, spec: LatticeSpec, signs: Tensor) -> Tensor:
    """Levels of the points with the given signs that are nearest."""
    table = points(spec.name).magnitudes.to(units.device)
    one, other = torch.triu_indices(table.shape[1], table.shape[1], 1, device=units.device)
    turned = (units @ metric) * signs
    mixed = metric[one, other] * signs[:, one] * signs[:, other]
    features = torch.cat([turned, mixed], dim=1)
    costs = torch.cat([-2 * table, 2 * table[:, one] * table[:, other]], dim=1)
    found = torch.addmm(table.square() @ metric.diagonal(), features, costs.T).argmin(1)
    return table[found] * signs


def fitted(weight: Tensor, spec: LatticeSpec, workers: Workers, importance: Tensor | None = None) -> Coded:
    """Codes and scales of weight [out, in] float32 of little error: the sum of importance [in] * (w - q)^2.

    Without importance large weights matter more than their share: errors count by the magnitude of a weight beside that
    of its group.
    """
    weigh = importance_of_rows(importance)

    def piece(part: Tensor) -> Coded:
        return _Fit(part.to(torch.float32), spec, weigh).coded()

    return Coded.by_rows(weight, at_once(weight, _CHUNK), workers, piece)


def importance_of_rows(importance: Tensor | None) -> Tensor | None:
    """An importance [in] beside its mean, none of it next to nothing."""
    if importance is None:
        return None
    importance = importance.to(torch.float32)
    mean = importance.mean()
    return (importance / mean).clamp_min_(_LEAST_IMPORTANCE) if mean > 0 else torch.ones_like(importance)


def whole_scales(scale: Tensor, bend: Tensor, spec: BlockSpec) -> tuple[Tensor, Tensor]:
    """d [out, blocks] and odd multiples for scales [out, groups], an error in which costs its square times `bend`.

    The scale of a group of zeros, which costs nothing, may be no number.
    """
    per, scale = spec.groups_per_block, scale.nan_to_num(nan=0.0)
    scale, bend = (part.view(len(part), -1, per) for part in (scale, bend))
    unit = scale.amax(-1, keepdim=True) / (spec.multiples or _ODD)[1]
    least = torch.full_like(unit, torch.inf)
    d, multiples = torch.zeros_like(unit), torch.ones_like(scale)
    for share in _UNITS:
        tried = spec.whole(torch.where(unit > 0, scale / (unit * share), 1.0))
        own = float16((bend * tried * scale).sum(-1, keepdim=True) / (bend * tried.square()).sum(-1, keepdim=True))
        loss = (bend * (own * tried - scale).square()).sum(-1, keepdim=True)
        better = loss < least
        least, d = torch.where(better, loss, least), torch.where(better, own, d)
        multiples = torch.where(better, tried, multiples)
    return d.squeeze(-1), multiples.flatten(1)


class _Fit:
    """Rows [out, in] that scales are found for; tensors are [rows, groups, units of a group, 4 or 8]."""

    def __init__(self, rows: Tensor, spec: LatticeSpec, importance: Tensor | None) -> None:
        self.spec, self.shape = spec, rows.shape
        self.table = points(spec.name).magnitudes.to(rows.device)
        size = self.table.shape[1]
        self.x = rows.view(len(rows), -1, spec.group_size // size, size)
        if importance is None:
            self.weigh = self.x.square().mean((2, 3), keepdim=True).sqrt() + self.x.abs()
        else:
            self.weigh = importance.view(1, *self.x.shape[1:]).expand_as(self.x)
        signs = torch.where(self.x < 0, -1.0, 1.0).view(len(rows), -1, UNIT)
        if spec.even:
            odd = signs.prod(-1) < 0
            cheapest = (self.x.abs() * self.weigh).view_as(signs).argmin(-1, keepdim=True)
            signs.scatter_(-1, cheapest, torch.where(odd.unsqueeze(-1), -1.0, 1.0) * signs.gather(-1, cheapest))
        self.signs = signs.view_as(self.x)
        self.turned = self.x * self.signs * self.weigh
        self.costs = torch.cat([self.table, self.table.square() * -0.5], dim=1).T

    def scores(self, scale: Tensor) -> Tensor:
        """For scales [rows, groups]: half of what points [..., points] take off the error, in units of the scale."""
        both = torch.cat([self.turned, self.weigh * scale[..., None, None]], dim=-1)
        return both @ self.costs

    def levels(self, scale: Tensor) -> Tensor:
        """Magnitudes of the nearest points for scales [rows, groups]."""
        return self.table[self.scores(scale).argmax(-1)]

    def coded(self) -> Coded:
        peak = self.x.abs().amax((2, 3)) / self.table.max()
        best, scale = torch.full_like(peak, -torch.inf), peak
        for reach in _REACHES:
            gain = self.scores(peak * reach).amax(-1).sum(-1).mul_(reach)
            scale = torch.where(gain > best, peak * reach, scale)
            best = torch.maximum(gain, best)
        levels = self.levels(scale)
        bend = (self.weigh * levels.square()).sum((2, 3))
        d, multiples = whole_scales((self.turned * levels).sum((2, 3)).clamp_min_(0) / bend, bend, self.spec)
        levels = self.levels(d.repeat_interleave(multiples.shape[1] // d.shape[1], dim=1) * multiples) * self.signs
        grid = LatticeGrid(self.spec, d, multiples)
        return Coded(grid.codes(levels.view(self.shape)), grid)


class Lattices(BlockType):
    """Types of GGUF rounded by eights."""

    name = "lattice"
    place = 98
    pattern = "|".join(SPECS)
    known = SPECS
    made = LatticeGrid
    said = "{} levels by eights, groups of {}; {:g} bits per weight"

    def listed(self) -> list[tuple[str, str]]:
        return [
            (s.name, self.said.format(len(points(s.name).values), s.group_size, s.bits_per_weight(0)))
            for s in SPECS.values()
        ]

    def fit(self, weight: Tensor, spec: LatticeSpec, how: Fitting) -> LatticeGrid:
        from llmcompress.workers import SERIAL

        grid = fitted(weight, spec, SERIAL, how.importance).grid  # who fits shares rows out
        assert isinstance(grid, LatticeGrid)
        return grid

    def rounded(
        self, weight: Tensor, spec: LatticeSpec, search: Search, workers: Workers, importance: Tensor | None
    ) -> Coded:
        if search != "compat":
            return fitted(weight, spec, workers, importance)
        from llmcompress.grids.compat_lattice import encode

        table = _point_table(spec.name)
        return encode(weight, spec, table, spec.even, partial(LatticeGrid, spec), workers, importance)

    def of_gguf_rows(self, spec: LatticeSpec, rows: Tensor) -> Coded:
        blocks = whole_blocks(rows, spec.block_bytes, spec.name)
        d = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1).to(torch.float32)
        places, signs, scales = LATTICE_BYTES[spec.name][1](blocks[..., 2:].to(torch.int64))
        table = points(spec.name)
        digits = torch.searchsorted(table.values[table.base :], table.magnitudes)[places].view(len(rows), -1)
        negative = ((signs.unsqueeze(-1) >> torch.arange(UNIT)) & 1).view_as(digits).bool()
        codes = torch.where(negative, table.base - 1 - digits, table.base + digits).to(torch.uint8)
        return Coded(codes, LatticeGrid(spec, d, (2 * scales + 1).to(torch.float32).flatten(1)))


GRID = Lattices()
