"""Floats of 4 bits (E2M1), of which groups share a scale: what MXFP4 and NVFP4 have in common.

A code is a sign and one of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. The code of minus zero is read and never chosen.
Two codes lie in a byte, the first in the low bits.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llmcompress.grids.base import GridRequest, Spec
from llmcompress.grids.coded import Coded, Grid
from llmcompress.grids.grid_type import GridType
from llmcompress.grids.scales import between, natural_groups, positive, row_costs, scale_loss
from llmcompress.hardware import at_once
from llmcompress.lazy import Tensor, torch

if TYPE_CHECKING:
    from typing_extensions import Self

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = MAGNITUDES[-1]
LEVELS = (*(-level for level in MAGNITUDES[:0:-1]), *MAGNITUDES)  # in ascending order, zero once
_CODES = (*range(15, 8, -1), *range(8))  # of those levels
_ROUNDS = 2  # of descent on scales
_SQUARES = 1 << 24  # numbers at once of how the scales of a row act on one another: groups are many
_CHUNK = 1 << 17  # weights searched at once: the temporaries stay in the cache


class E2m1Spec(Spec):
    """Plain data of a grid of 4-bit floats."""

    bits: ClassVar[int] = 4
    symmetric: ClassVar[bool] = True
    scaled: ClassVar[bool] = True

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight; what is stored once for a matrix is not counted."""
        return self.bits + 8 / self.group_size


@dataclass(frozen=True)
class E2m1Grid(Grid):
    """Fitted grid of a matrix [out, in] whose groups are contiguous and whose scales are of a small set."""

    @abstractmethod
    def tried(self, old: Tensor, wanted: Tensor) -> Sequence[Tensor]:
        """Scales [out] that may take the place of `old`, where the loss is least at `wanted`."""

    @abstractmethod
    def rescaled(self, scale: Tensor, rows: Tensor) -> Self:
        """The grid with other scales [out, groups], each of the set, in the rows where `rows` [out] is true."""

    @property
    def group_index(self) -> Tensor:
        width = self.scale.shape[1] * self.spec.group_size
        return natural_groups(self.spec, width).to(self.scale.device)

    @property
    def table(self) -> Tensor:
        return torch.tensor(LEVELS, device=self.scale.device)

    def levels(self, codes: Tensor) -> Tensor:
        sizes = torch.tensor((*MAGNITUDES, *(-level for level in MAGNITUDES)), device=codes.device)
        return sizes[codes.long()]

    def codes(self, levels: Tensor) -> Tensor:
        place = torch.bucketize(levels.contiguous(), between(self.table), right=True)
        return torch.tensor(_CODES, dtype=torch.uint8, device=levels.device)[place]

    def encode(self, weight: Tensor) -> Tensor:
        return self.codes(weight / self._spread())

    def decode(self, codes: Tensor) -> Tensor:
        return self.levels(codes) * self._spread()

    def _spread(self) -> Tensor:
        return self.scale.repeat_interleave(self.spec.group_size, dim=1)

    def refit(self, codes: Tensor, hessian: Tensor, target: Tensor, scale_dtype: torch.dtype) -> Coded:
        """Better scales, one moved after another where that lowers the loss; no row gets worse."""
        rows, groups = self.scale.shape
        step = max(1, _SQUARES // groups**2)
        parts = (slice(start, start + step) for start in range(0, rows, step))
        return Coded.stacked([self.rows(part)._refit(codes[part], hessian, target[part]) for part in parts])

    def _refit(self, codes: Tensor, hessian: Tensor, target: Tensor) -> Coded:
        square, linear = scale_loss(codes, self, hessian, target)
        before = self.scale
        scale, bend = before.clone(), square.diagonal(dim1=1, dim2=2)
        slope = linear - torch.einsum("rgh,rh->rg", square, scale)
        for _ in range(_ROUNDS):
            for group in range(scale.shape[1]):
                old, steep = scale[:, group], bend[:, group]
                wanted = torch.where(steep > 0, old + slope[:, group] / steep, old)
                best, gain = old, torch.zeros_like(old)
                for tried in self.tried(old, wanted):
                    step = tried - old
                    found = 2 * step * slope[:, group] - step * step * steep
                    best, gain = torch.where(found > gain, tried, best), torch.maximum(found, gain)
                slope = slope - square[:, :, group] * (best - old).unsqueeze(1)
                scale[:, group] = best
        return Coded(codes, self.rescaled(scale, row_costs(square, linear, scale) < row_costs(square, linear, before)))


class E2m1Type(GridType):
    """Floats of 4 bits, of which there is one spec. made: that spec."""

    widths = (4,)
    formats = ("compressed-tensors",)
    made: ClassVar[Spec]

    def named(self, found: re.Match[str]) -> Spec:
        return self.made

    def spec(self, asked: GridRequest) -> Spec:
        return self.made

    def specs(self) -> list[Spec]:
        return [self.made]


def paired(codes: Tensor) -> Tensor:
    """Bytes [out, in / 2] of codes [out, in]."""
    pairs = codes.reshape(codes.shape[0], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def unpaired(pairs: Tensor) -> Tensor:
    """The inverse of `paired`."""
    return torch.stack([pairs & 15, pairs >> 4], dim=2).reshape(pairs.shape[0], -1)


def halves(codes: Tensor, size: int) -> Tensor:
    """Bytes [out, blocks, size / 2] of codes [out, in], as GGUF pairs them: a block's first half in the low bits."""
    blocks = codes.reshape(codes.shape[0], -1, 2, size // 2)
    return blocks[:, :, 0] | blocks[:, :, 1] << 4


def unhalved(bytes_: Tensor) -> Tensor:
    """The inverse of `halves`."""
    return torch.stack([bytes_ & 15, bytes_ >> 4], dim=2).reshape(bytes_.shape[0], -1)


def by_blocks(
    weight: Tensor, size: int, importance: Tensor | None, search: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """[out, groups] of `search(block, weigh)` for parts of the rows of weight [out, in].

    block [rows, groups, size]: a part of the rows. importance [in]: what an error in an input channel costs; weigh
    [1, groups, size] is the same, nowhere zero.
    """
    width = weight.shape[1]
    weigh = torch.ones(width, device=weight.device) if importance is None else importance.to(torch.float32)
    weigh = positive(weigh).view(1, -1, size)
    parts = torch.split(weight, max(1, at_once(weight, _CHUNK) // width))
    return torch.cat([search(part.reshape(len(part), -1, size), weigh) for part in parts])


def best_scale(block: Tensor, weigh: Tensor, scales: Sequence[Tensor]) -> Tensor:
    """Which of `scales`, each [rows, groups], gives a block [rows, groups, size] the least weighted squared error."""
    best, least = scales[0], _lost(block, weigh, scales[0])
    for tried in scales[1:]:
        loss = _lost(block, weigh, tried)
        best, least = torch.where(loss < least, tried, best), torch.minimum(loss, least)
    return best


def _lost(block: Tensor, weigh: Tensor, scale: Tensor) -> Tensor:
    scale, table = scale.unsqueeze(-1), torch.tensor(LEVELS, device=block.device)
    levels = table[torch.bucketize(block / scale, between(table), right=True)]
    return (levels * scale).sub_(block).square_().mul_(weigh).sum(-1)
