"""Types of GGUF below two bits whose weights are rounded eight at a time: IQ1_S and IQ1_M.

Eight weights are a row of a table of the gguf package, of minus one, zero and one, all of them raised or lowered by an
eighth, times a scale: a float16 `d` of 256 weights times an odd whole number of 32 weights (IQ1_S) or 16 (IQ1_M). In
IQ1_S those 32 are raised or lowered alike. What is nearest depends on how errors of neighbours add up, as in `lattice`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from llmcompress.grids.base import Search
from llmcompress.grids.block_type import BlockType
from llmcompress.grids.blocks import BlockGrid, BlockSpec, whole_blocks
from llmcompress.grids.coded import Coded
from llmcompress.grids.lattice import UNIT, importance_of_rows, whole_odd, whole_scales
from llmcompress.hardware import at_once
from llmcompress.lazy import Tensor, torch
from llmcompress.packing.ternary_bytes import pack_iq1m, pack_iq1s, take_iq1m, take_iq1s

if TYPE_CHECKING:
    from llmcompress.grids.compat_points import PointTable
    from llmcompress.workers import Workers

_CHUNK = 1 << 14  # weights fitted at once, and
_UNITS_AT_ONCE = 512  # units compared with the table at once: what they cost stays in the cache
_REACHES = tuple(0.3 + 0.05 * i for i in range(15))  # of the largest magnitude of a group, tried for the largest level
_SHIFT = 0.125
_LARGEST = 1 + _SHIFT


@dataclass(frozen=True)
class OneBitSpec(BlockSpec):
    """shared: whether the weights of a group are all raised or all lowered, not each eight."""

    shared: bool = False

    type: ClassVar[str] = "one-bit"

    @property
    def levels(self) -> int:
        return 6

    def whole(self, multiples: Tensor) -> Tensor:
        """The nearest odd numbers that scales may be."""
        return whole_odd(multiples, self)

    @property
    def together(self) -> int:
        return UNIT


SPECS = {
    spec.name: spec
    for spec in (
        OneBitSpec("IQ1_S", 256, 50, 32, 3, multiples=(1, 15), shared=True),
        OneBitSpec("IQ1_M", 256, 56, 16, 3, multiples=(1, 15)),
    )
}
_BYTES = {"IQ1_S": (pack_iq1s, take_iq1s), "IQ1_M": (pack_iq1m, take_iq1m)}


@cache
def points() -> Tensor:
    """The table [2048, 8] float32."""
    from gguf.quants import IQ1_S

    IQ1_S.init_grid()
    return torch.from_numpy(IQ1_S.grid.reshape(-1, UNIT).copy()).to(torch.float32)


@cache
def _places() -> Tensor:
    """Which row of the table eight places of 0 to 2 are, read as digits [3 ** 8] int64; -1 for none."""
    place = torch.full((3**UNIT,), -1, dtype=torch.int64)
    place[_number(points().to(torch.int64) + 1)] = torch.arange(len(points()))
    return place


@cache
def _eights() -> PointTable:
    """The table as llama-quantize looks for points in it."""
    from llmcompress.grids.compat_points import PointTable

    return PointTable.of(points().numpy().astype(int) + 1, 3, 3)


def _number(digits: Tensor) -> Tensor:
    return (digits * 3 ** torch.arange(UNIT, device=digits.device)).sum(-1)


@dataclass(frozen=True)
class OneBitGrid(BlockGrid):
    """Fitted grid of a matrix [out, in]; the fields are those of `BlockGrid`, multiples being odd.

    raised [out, groups] float32: 1 or 0, where a group is raised or lowered as a whole. Codes are places in `table`, of
    which the odd ones are raised.
    """

    spec: OneBitSpec
    raised: Tensor | None = None

    by_row: ClassVar[Mapping[str, str | None]] = {**BlockGrid.by_row, "raised": "int8"}

    @property
    def table(self) -> Tensor:
        return torch.tensor([-1, -1, 0, 0, 1, 1], device=self.d.device) + _SHIFT * torch.tensor(
            [-1, 1, -1, 1, -1, 1], device=self.d.device
        )

    @property
    def parts(self) -> dict[str, Tensor]:
        return super().parts if self.raised is None else {**super().parts, "raised": self.raised}

    def codes(self, levels: Tensor) -> Tensor:
        """Codes uint8 of levels [out, in] that are points."""
        return torch.searchsorted(self.table, levels.contiguous()).to(torch.uint8)

    def encode(self, weight: Tensor) -> Tensor:
        """Codes of the nearest points for weight [out, in], errors counting alike."""
        metric, size = torch.eye(UNIT, device=weight.device), self.spec.group_size
        scale = self.scale.repeat_interleave(size, dim=1)
        units = torch.where(scale == 0, 0.0, weight / scale)
        starts = range(0, weight.shape[1], UNIT)
        parts = [self.snapped(units[:, start : start + UNIT], metric, start // size) for start in starts]
        return self.codes(torch.cat(parts, dim=1))

    def snapped(self, units: Tensor, metric: Tensor, group: int) -> Tensor:
        if self.raised is None:
            return nearest(units, metric, torch.cat([points() + _SHIFT, points() - _SHIFT]).to(units.device))
        shift = _shifts(self.raised[:, group]).unsqueeze(1)
        return nearest(units - shift, metric, points().to(units.device)) + shift

    def numbers(self, codes: Tensor) -> bool:
        raised = self._raised(codes)
        alike = self.raised is None or torch.equal(
            raised, self.raised.to(torch.int64).repeat_interleave(self.spec.group_size // UNIT, dim=1)
        )
        whole = torch.equal(codes.to(torch.int64) & 1, raised.repeat_interleave(UNIT, dim=1))
        return alike and whole and bool((self._rows(codes) >= 0).all())

    def _raised(self, codes: Tensor) -> Tensor:
        return codes[:, ::UNIT].to(torch.int64) & 1

    def _rows(self, codes: Tensor) -> Tensor:
        """Rows of the table [out, in / 8] of codes [out, in]; -1 where these are no point."""
        return _places().to(codes.device)[_number(codes.view(len(codes), -1, UNIT).to(torch.int64) >> 1)]

    def gguf_rows(self, codes: Tensor) -> Tensor:
        assert self.multiples is not None
        parts = (self._rows(codes), 1 - self._raised(codes), ((self.multiples - 1) / 2).to(torch.int64))
        blocks = (part.view(*self.d.shape, -1) for part in parts)
        return _BYTES[self.spec.name][0](self.d, *blocks).flatten(1)


def _shifts(raised: Tensor) -> Tensor:
    return (2 * raised - 1) * _SHIFT


def nearest(units: Tensor, metric: Tensor, table: Tensor) -> Tensor:
    """Rows of `table` [points, 8] nearest to values [n, 8], errors e of which cost e metric e^T."""
    own = ((table @ metric) * table).sum(1)
    turned, sides = units @ metric, (-2 * table).T.contiguous()
    parts = torch.split(turned, at_once(units, _UNITS_AT_ONCE))
    return table[torch.cat([torch.addmm(own, part, sides).argmin(1) for part in parts])]


def fitted(weight: Tensor, spec: OneBitSpec, workers: Workers, importance: Tensor | None = None) -> Coded:
    """Codes and scales of weight [out, in] float32 of little error: the sum of importance [in] * (w - q)^2.

    Without importance errors count by the magnitude of a weight beside that of its group.
    """
    weigh = importance_of_rows(importance)

    def piece(part: Tensor) -> Coded:
        return _Fit(part.to(torch.float32), spec, weigh).coded()

    return Coded.by_rows(weight, at_once(weight, _CHUNK), workers, piece)


class _Fit:
    """Rows [out, in] that scales are found for; tensors are [rows, groups, units of a group, 8]."""

    def __init__(self, rows: Tensor, spec: OneBitSpec, importance: Tensor | None) -> None:
        self.spec, self.shape = spec, rows.shape
        self.x = rows.view(len(rows), -1, spec.group_size // UNIT, UNIT)
        if importance is None:
            self.weigh = self.x.square().mean((2, 3), keepdim=True).sqrt() + self.x.abs()
        else:
            self.weigh = importance.view(1, *self.x.shape[1:]).expand_as(self.x)
        self.table = points().to(rows.device)

    def coded(self) -> Coded:
        scale, shift = self.begun()
        levels = None
        for _ in range(2):
            levels, shift = self.levels(scale, shift)
            slope, bend = ((self.weigh * part * levels).sum((2, 3)) for part in (self.x, levels))
            scale = slope.clamp_min_(0) / bend
        d, multiples = whole_scales(scale, bend, self.spec)
        scale = d.repeat_interleave(self.spec.groups_per_block, dim=1) * multiples
        levels, shift = self.levels(scale, shift, free=False)
        raised = (shift > 0).to(torch.float32)[..., 0, 0] if self.spec.shared else None
        grid = OneBitGrid(self.spec, d, multiples, raised=raised)
        return Coded(grid.codes(levels.view(self.shape)), grid)

    def begun(self) -> tuple[Tensor, Tensor]:
        """Scales [rows, groups] and shifts [rows, groups, 1 or units, 1] that are best if the table had all points."""
        peak = self.x.abs().amax((2, 3)) / _LARGEST
        best = torch.full_like(peak, -torch.inf)
        scale, shifts = peak, torch.full_like(self.x[:, :, : 1 if self.spec.shared else None, :1], _SHIFT)
        for reach in _REACHES:
            tried = (peak * reach).clamp_min_(torch.finfo(peak.dtype).tiny)[..., None, None]
            gains = []
            for shift in (_SHIFT, -_SHIFT):
                levels = (self.x / tried - shift).round_().clamp_(-1, 1).add_(shift)
                gain = (self.weigh * levels * (2 * self.x - tried * levels)).sum(-1, keepdim=True)
                gains.append(gain.sum(2, keepdim=True) if self.spec.shared else gain)
            raised, lowered = gains
            gain = torch.maximum(raised, lowered).sum((2, 3)) * tried[..., 0, 0]
            better = gain > best
            best, scale = torch.where(better, gain, best), torch.where(better, peak * reach, scale)
            found = torch.where(raised >= lowered, _SHIFT, -_SHIFT)
            shifts = torch.where(better[..., None, None], found, shifts)
        return scale, shifts

    def levels(self, scale: Tensor, shift: Tensor, *, free: bool = True) -> tuple[Tensor, Tensor]:
        """Levels of the nearest points for scales [rows, groups], and shifts; unless `free`, those of groups stay."""
        if self.spec.shared and not free:
            return self._with(scale, shift)[0], shift
        (up, raised), (down, lowered) = (self._with(scale, torch.full_like(shift, one)) for one in (_SHIFT, -_SHIFT))
        if self.spec.shared:
            raised, lowered = (cost.sum(2, keepdim=True) for cost in (raised, lowered))
        better = raised <= lowered
        return torch.where(better, up, down), torch.where(better, _SHIFT, -_SHIFT)

    def _with(self, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Levels of the nearest points with given shifts, and what units [rows, groups, units, 1] cost."""
        by = scale[..., None, None]
        goal = self.x - by * shift
        both = torch.cat([goal * self.weigh, self.weigh * by], dim=-1).view(-1, 2 * UNIT)
        sides = torch.cat([self.table, self.table.square() * -0.5], dim=1).T.contiguous()
        parts = torch.split(both, at_once(both, _UNITS_AT_ONCE))
        found = self.table[torch.cat([(part @ sides).argmax(1) for part in parts])].view_as(self.x)
        return found + shift, (self.weigh * (goal - by * found).square()).sum(-1, keepdim=True)


class OneBits(BlockType):
    """Types of GGUF below two bits, rounded by eights."""

    name = "one-bit"
    place = 96
    pattern = "|".join(SPECS)
    known = SPECS
    made = OneBitGrid
    said = "{} levels by eights, groups of {}; {:g} bits per weight"

    def rounded(
        self, weight: Tensor, spec: OneBitSpec, search: Search, workers: Workers, importance: Tensor | None
    ) -> Coded:
        if search != "compat":
            return fitted(weight, spec, workers, importance)
        from llmcompress.grids.compat_one_bit import encode

        def made(d: Tensor, multiples: Tensor, raised: Tensor | None) -> OneBitGrid:
            return OneBitGrid(spec, d, multiples, raised=raised)

        return encode(weight, spec, _eights(), made, workers, importance)

    def of_gguf_rows(self, spec: OneBitSpec, rows: Tensor) -> Coded:
        d, places, lowered, scales = _BYTES[spec.name][1](whole_blocks(rows, spec.block_bytes, spec.name))
        digits = (points()[places] + 1).to(torch.int64)
        codes = (2 * digits + (1 - lowered).unsqueeze(-1)).to(torch.uint8).view(len(rows), -1)
        raised = 1 - lowered[..., ::4].to(torch.float32).flatten(1) if spec.shared else None
        return Coded(codes, OneBitGrid(spec, d, (2 * scales + 1).to(torch.float32).flatten(1), raised=raised))


GRID = OneBits()
