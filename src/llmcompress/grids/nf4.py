"""NF4 as a grid, its absmax as it is or quantised again, both to the bit as bitsandbytes decodes them.

A value is level * absmax with one of 16 fixed levels and the absmax of its block of 64 weights. Doubly quantised, the
absmax is itself map[code] * nested + offset: a value of the dynamic 8-bit map (arXiv:2110.02861, section 2.1; here
`dynamic_map`), the absmax of 256 of them in a row, counted through the whole matrix, and their mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from pydantic import Field

from llmcompress.grids.base import Clip, GridOptions, Spec
from llmcompress.grids.errors import positive
from llmcompress.grids.grid_type import Fitting, GridType
from llmcompress.grids.level_table import level_table
from llmcompress.grids.scales import ScaledGrid, between
from llmcompress.hardware import at_once
from llmcompress.lazy import Tensor, torch

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_SHRINKS = (0.96, 0.92, 0.88, 0.84, 0.80, 0.75, 0.70)
_CHUNK = 1 << 17  # weights searched at once: the temporaries stay in the cache


@dataclass(frozen=True)
class Nf4Spec(Spec):
    """NF4 (QLoRA, arXiv:2305.14314, section 3): 16 quantiles of a normal distribution times the block's absmax.

    double: absmax is 8 bits of a nested block's, plus an offset of the whole matrix; else it is float32.
    """

    double: bool = True

    type: ClassVar[str] = "nf4"
    bits: ClassVar[int] = 4
    symmetric: ClassVar[bool] = True
    group_size: ClassVar[int] = 64
    nested: ClassVar[int] = 256

    @property
    def name(self) -> str:
        return "nf4-double" if self.double else "nf4"

    @property
    def joins_rows(self) -> bool:
        return self.double

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight; the offset of the matrix and a nested block that is part empty are not counted."""
        return self.bits + ((8 + 32 / self.nested) if self.double else 32) / self.group_size


@dataclass(frozen=True)
class Nf4Grid(ScaledGrid):
    """Fitted grid of a matrix [out, in]. absmax [out, groups] float32: the scales.

    Doubly quantised, they are made of code [out, groups] uint8, nested [out, groups] float32, the absmax of the nested
    block that each lies in, and common [out, 1] float32, the offset, the same in every row.
    """

    spec: Nf4Spec
    absmax: Tensor
    code: Tensor | None = None
    nested: Tensor | None = None
    common: Tensor | None = None

    by_row: ClassVar[Mapping[str, str | None]] = dict.fromkeys(("absmax", "code", "nested", "common"))

    @property
    def scale(self) -> Tensor:
        return self.absmax

    @property
    def group_index(self) -> Tensor:
        return torch.arange(self.absmax.shape[1], device=self.absmax.device).repeat_interleave(self.spec.group_size)

    @property
    def table(self) -> Tensor:
        return torch.tensor(LEVELS, dtype=torch.float32, device=self.absmax.device)

    def levels(self, codes: Tensor) -> Tensor:
        return self.table[codes.long()]

    def codes(self, levels: Tensor) -> Tensor:
        return level_table(LEVELS, levels.device).codes(levels)

    def decode(self, codes: Tensor) -> Tensor:
        grouped = self.levels(codes).view(*self.absmax.shape, self.spec.group_size)
        return (grouped * self.absmax.unsqueeze(-1)).view(codes.shape)

    def encode(self, weight: Tensor) -> Tensor:
        """Nearest codes uint8 of a whole matrix [out, in]; level zero where a scale is zero."""
        inverse = torch.where(self.absmax == 0, 0.0, 1 / self.absmax)
        grouped = weight.view(*self.absmax.shape, self.spec.group_size) * inverse.unsqueeze(-1)
        return self.codes(grouped).view(weight.shape)

    def rescaled(self, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> Nf4Grid:
        """The grid with other scales [out, groups] in the rows where `rows` [out] is true.

        Doubly quantised, they move to the nearest that the nested blocks have a code for. dtype: says nothing here.
        """
        moved = absmax_grid(scale) if self.code is None else self._requantised(scale)
        old, keep = self.stored(), ~rows.unsqueeze(1)
        return restored(self.spec, **{n: torch.where(keep, old[n], new) for n, new in moved.stored().items()})

    def _requantised(self, scale: Tensor) -> Nf4Grid:
        assert self.nested is not None
        assert self.common is not None
        code = _dynamic_codes(scale - self.common, self.nested)
        return restored(self.spec, code=code, nested=self.nested, offset=self.common)

    def stored(self) -> dict[str, Tensor]:
        if self.code is None or self.nested is None or self.common is None:
            return {"absmax": self.absmax}
        return {"code": self.code, "nested": self.nested, "offset": self.common}


class Nf4Options(GridOptions):
    """Options of nf4."""

    double_quant: bool = Field(True, description="quantise the scales of nf4 in their turn")


class Nf4(GridType):
    """16 quantiles of a normal distribution times a scale of their block."""

    name = "nf4"
    place = 2
    values = "NF4 in blocks of 64"
    pattern = "nf4(-double)?"
    widths = (4,)
    options = Nf4Options
    formats = ("bitsandbytes",)

    def named(self, found: re.Match[str]) -> Spec:
        return Nf4Spec(bool(found[1]))

    def spec(self, asked: Any) -> Spec:
        return Nf4Spec(asked.double_quant)

    def specs(self) -> list[Spec]:
        return [Nf4Spec(), Nf4Spec(double=False)]

    def fit(self, weight: Tensor, spec: Nf4Spec, how: Fitting) -> Nf4Grid:
        return fit(weight, spec, clip=how.clip, importance=how.importance)

    def restored(self, spec: Nf4Spec, width: int, parts: Mapping[str, Tensor]) -> Nf4Grid:
        return restored(spec, **parts)


GRID = Nf4()


def restored(spec: Nf4Spec, **parts: Tensor) -> Nf4Grid:
    """The grid of its stored tensors: absmax, or code, nested and offset, which the absmax is then made of."""
    if not spec.double:
        return Nf4Grid(spec, parts["absmax"])
    code, nested, offset = parts["code"], parts["nested"], parts["offset"]
    absmax = dynamic_map().to(code.device)[code.long()] * nested + offset
    return Nf4Grid(spec, absmax, code, nested, offset)


def absmax_grid(absmax: Tensor) -> Nf4Grid:
    """The grid of scales float32 [out, groups] that are stored as they are."""
    return Nf4Grid(Nf4Spec(double=False), absmax)


def doubled(absmax: Tensor) -> Nf4Grid:
    """The grid of scales float32 [out, groups] of a whole matrix, quantised in their turn."""
    spec = Nf4Spec(double=True)
    offset = absmax.mean()
    moved = (absmax - offset).reshape(-1)
    padded = torch.nn.functional.pad(moved, (0, -moved.numel() % spec.nested)).view(-1, spec.nested)
    nested = padded.abs().amax(dim=1).repeat_interleave(spec.nested)[: moved.numel()].view_as(absmax)
    code = _dynamic_codes(absmax - offset, nested)
    return restored(spec, code=code, nested=nested, offset=offset.expand(absmax.shape[0], 1).contiguous())


def fit(weight: Tensor, spec: Nf4Spec, *, clip: Clip = "search", importance: Tensor | None = None) -> Nf4Grid:
    """Choose the scales of a whole matrix [out, in] float32.

    minmax: the absmax, as bitsandbytes takes it. search: what loses least squared error, each input channel weighted
    by importance [in], of absmax and smaller scales; then by least squares for the codes that gives.
    """
    rows, width = weight.shape
    weigh = torch.ones(width, device=weight.device) if importance is None else importance.to(torch.float32)
    weigh = positive(weigh).view(1, -1, spec.group_size)
    step = max(1, at_once(weight, _CHUNK) // width)
    blocks = (part.reshape(part.shape[0], -1, spec.group_size) for part in torch.split(weight, step))
    scales = [block.abs().amax(-1) if clip == "minmax" else _searched(block, weigh) for block in blocks]
    absmax = torch.cat(scales) if rows else weight.new_empty(0, width // spec.group_size)
    return doubled(absmax) if spec.double else absmax_grid(absmax)


def _searched(block: Tensor, weigh: Tensor) -> Tensor:
    """Scales [rows, groups] for block [rows, groups, 64] by weighted least squares; absmax is a candidate."""
    table = level_table(LEVELS, block.device)
    largest = block.abs().amax(-1)
    best, least = largest, torch.full_like(largest, torch.inf)

    def levels(scale: Tensor) -> Tensor:
        return table.nearest(block * torch.where(scale == 0, 0.0, 1 / scale).unsqueeze(-1))

    def offer(scale: Tensor) -> None:
        nonlocal best, least
        loss = (levels(scale).mul_(scale.unsqueeze(-1)).sub_(block)).square_().mul_(weigh).sum(-1)
        better = loss < least
        best, least = torch.where(better, scale, best), torch.where(better, loss, least)

    offer(largest)
    for shrink in _SHRINKS:
        offer(largest * shrink)
    for _ in range(2):
        tried = levels(best)
        weighted = tried * weigh
        square = (weighted * tried).sum(-1)
        offer(torch.where(square > 0, (weighted * block).sum(-1) / square.clamp_min(1e-30), best))
    return best


@cache
def dynamic_map() -> Tensor:
    """The 256 values of the signed dynamic map, ascending, float32.

    For each exponent e = 0 ... 6, the midpoints of 2^e equal parts of [0.1, 1] times 10^(e - 6), of both signs; 0; 1.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        ends = torch.linspace(0.1, 1, (1 << exponent) + 1, dtype=torch.float32)
        parts = (10 ** (exponent - 6) * ((ends[:-1] + ends[1:]) / 2)).tolist()
        values += [sign * part for part in parts for sign in (1, -1)]
    return torch.tensor(sorted(values), dtype=torch.float32)


def _dynamic_codes(value: Tensor, nested: Tensor) -> Tensor:
    """Codes uint8 of the values of the map nearest to value / nested; that of zero where nested is zero."""
    middles = between(dynamic_map()).to(value.device)
    share = torch.where(nested > 0, value / nested, 0.0)
    return torch.bucketize(share.contiguous(), middles, right=True).to(torch.uint8)
