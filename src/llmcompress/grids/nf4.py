"""NF4 as a grid, its absmax as it is or quantised again, both to the bit as bitsandbytes decodes them.

A value is level * absmax with one of 16 fixed levels and the absmax of its block of 64 weights. Doubly quantised, the
absmax is itself map[code] * nested + offset: a value of the dynamic 8-bit map (arXiv:2110.02861, section 2.1; here
`dynamic_map`), the absmax of 256 of them in a row, counted through the whole matrix, and their mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from llmcompress.grids.base import Nf4Spec
from llmcompress.grids.blocks import between
from llmcompress.grids.integer import Clip, positive
from llmcompress.hardware import at_once

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
class Nf4Grid:
    """Fitted grid of a matrix [out, in]. absmax [out, groups] float32: the scales.

    Doubly quantised, they are made of code [out, groups] uint8, nested [out, groups] float32, the absmax of the nested
    block that each lies in, and common [out, 1] float32, the offset, the same in every row.
    """

    spec: Nf4Spec
    absmax: Tensor
    code: Tensor | None = None
    nested: Tensor | None = None
    common: Tensor | None = None

    offset: ClassVar[None] = None  # what is added to scale * level

    @property
    def scale(self) -> Tensor:
        """Scale of each group [out, groups]."""
        return self.absmax

    @property
    def group_index(self) -> Tensor:
        """[in] int64: the group of each input channel."""
        return torch.arange(self.absmax.shape[1], device=self.absmax.device).repeat_interleave(self.spec.group_size)

    @property
    def table(self) -> Tensor:
        """Levels of the codes [16] float32."""
        return torch.tensor(LEVELS, dtype=torch.float32, device=self.absmax.device)

    def levels(self, codes: Tensor) -> Tensor:
        """Levels float32 of codes [out, in]: what they stand for, in units of the scale."""
        return self.table[codes.long()]

    def codes(self, levels: Tensor) -> Tensor:
        """Codes uint8 of the levels [out, in] nearest to values given in units of the scale."""
        return torch.bucketize(levels.contiguous(), between(self.table), right=True).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Values float32 of codes uint8 [out, in]."""
        grouped = self.levels(codes).view(*self.absmax.shape, self.spec.group_size)
        return (grouped * self.absmax.unsqueeze(-1)).view(codes.shape)

    def encode(self, weight: Tensor) -> Tensor:
        """Nearest codes uint8 of a whole matrix [out, in]; level zero where a scale is zero."""
        inverse = torch.where(self.absmax == 0, 0.0, 1 / self.absmax)
        grouped = weight.view(*self.absmax.shape, self.spec.group_size) * inverse.unsqueeze(-1)
        return self.codes(grouped).view(weight.shape)

    def rescaled(self, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> "Nf4Grid":
        """The grid with other scales [out, groups] in the rows where `rows` [out] is true.

        Doubly quantised, they move to the nearest that the nested blocks have a code for. dtype: says nothing here.
        """
        moved = absmax_grid(scale) if self.code is None else self._requantised(scale)
        keep = ~rows.unsqueeze(1)
        parts = {name: torch.where(keep, old, moved.parts[name]) for name, old in self.parts.items()}
        return Nf4Grid.restored(self.spec, **parts)

    def _requantised(self, scale: Tensor) -> "Nf4Grid":
        assert self.nested is not None
        assert self.common is not None
        code = _dynamic_codes(scale - self.common, self.nested)
        return Nf4Grid.restored(self.spec, code=code, nested=self.nested, offset=self.common)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors that are stored, by name."""
        if self.code is None or self.nested is None or self.common is None:
            return {"absmax": self.absmax}
        return {"code": self.code, "nested": self.nested, "offset": self.common}

    def stored(self) -> dict[str, Tensor]:
        """Tensors that tell this grid from others of its spec; `restored` takes them back."""
        return self.parts

    @classmethod
    def restored(cls, spec: Nf4Spec, **parts: Tensor) -> "Nf4Grid":
        if not spec.double:
            return cls(spec, parts["absmax"])
        code, nested, offset = parts["code"], parts["nested"], parts["offset"]
        absmax = dynamic_map().to(code.device)[code.long()] * nested + offset
        return cls(spec, absmax, code, nested, offset)

    def to(self, device: torch.device | str) -> "Nf4Grid":
        """The same grid on another device."""
        return self.restored(self.spec, **{name: part.to(device) for name, part in self.parts.items()})

    def rows(self, index: slice | Tensor) -> "Nf4Grid":
        """The grid of some output rows."""
        return self.restored(self.spec, **{name: part[index] for name, part in self.parts.items()})

    @classmethod
    def stacked(cls, grids: "Sequence[Nf4Grid]") -> "Nf4Grid":
        """The grid of matrices whose rows follow one another, or of parts of one matrix."""
        parts = [grid.parts for grid in grids]
        return cls.restored(grids[0].spec, **{name: torch.cat([part[name] for part in parts]) for name in parts[0]})


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
    return Nf4Grid.restored(spec, code=code, nested=nested, offset=offset.expand(absmax.shape[0], 1).contiguous())


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
    table = torch.tensor(LEVELS, dtype=torch.float32, device=block.device)
    middles = between(table)
    largest = block.abs().amax(-1)
    best, least, levels = largest, torch.full_like(largest, torch.inf), torch.zeros_like(block)

    def offer(scale: Tensor) -> None:
        nonlocal best, least, levels
        inverse = torch.where(scale == 0, 0.0, 1 / scale).unsqueeze(-1)
        tried = table[torch.bucketize(block * inverse, middles, right=True)]
        loss = (tried * scale.unsqueeze(-1) - block).square_().mul_(weigh).sum(-1)
        better = loss < least
        best, least = torch.where(better, scale, best), torch.where(better, loss, least)
        levels = torch.where(better.unsqueeze(-1), tried, levels)

    offer(largest)
    for shrink in _SHRINKS:
        offer(largest * shrink)
    for _ in range(2):
        weighted = levels * weigh
        square = (weighted * levels).sum(-1)
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
