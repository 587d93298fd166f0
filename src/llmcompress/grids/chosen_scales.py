"""Scales of contiguous groups that are of a small set, such as powers of two: which one is best, and moving them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from llmcompress.grids.coded import Coded, Grid, Rescale
from llmcompress.grids.errors import positive
from llmcompress.grids.scales import between, natural_groups
from llmcompress.hardware import at_once
from llmcompress.lazy import Tensor, torch

if TYPE_CHECKING:
    from typing import Self

    from llmcompress.grids.base import Clip, Spec

BIAS = 127  # of powers of two that are stored as bytes
_AT_ONCE = 1 << 24  # weights of rows whose scales and codes are chosen together
_CHUNK = 1 << 17  # weights searched at once: the temporaries stay in the cache


class ChosenScaleGrid(Grid):
    """Fitted grid of a matrix [out, in] whose groups are contiguous and whose scales are of a small set."""

    @abstractmethod
    def rescaled(self, scale: Tensor) -> Self:
        """The grid with other scales [out, groups], each of the set."""

    @abstractmethod
    def beside_scale(self, old: Tensor) -> Sequence[Tensor]:
        """Scales of any shape that are tried in the place of `old` together with other codes, `old` among them."""

    @property
    def group_index(self) -> Tensor:
        width = self.scale.shape[1] * self.spec.group_size
        return natural_groups(self.spec, width).to(self.scale.device)

    def encode(self, weight: Tensor) -> Tensor:
        return self.codes(weight / self._spread())

    def decode(self, codes: Tensor) -> Tensor:
        return self.levels(codes) * self._spread()

    def _spread(self) -> Tensor:
        return self.scale.repeat_interleave(self.spec.group_size, dim=1)

    def refit_all(
        self,
        codes: Tensor,
        hessian: Tensor,
        gradient: Tensor,
        scale_dtype: torch.dtype,
        keep: Tensor | None = None,
        rescale: Rescale | None = None,
    ) -> Coded:
        """Group after group, each row takes of some scales, with the codes that each of them asks for, the best.

        What a group should be is told by the gradient; its codes are decided one by one, those behind making up for the
        error as far as the group's own part of the Gram matrix lets them (GPTQ within the group).
        """
        step = max(1, _AT_ONCE // len(hessian))
        parts = (slice(start, start + step) for start in range(0, len(codes), step))

        def refitted(part: slice) -> Coded:
            kept = None if keep is None else keep[part]
            return self.rows(part)._refit_all(codes[part], hessian, gradient[part], kept, rescale)

        return Coded.stacked([refitted(part) for part in parts])

    def _refit_all(
        self, codes: Tensor, hessian: Tensor, gradient: Tensor, keep: Tensor | None, rescale: Rescale | None
    ) -> Coded:
        from llmcompress.grids.snapping import rescale_

        size, table, bounds = self.spec.group_size, self.table, None
        if table is None:
            bounds = self.bounds[0].T.contiguous(), self.bounds[1].T.contiguous()
        slopes, scale = gradient.T.contiguous(), self.scale.T.contiguous()  # [in, out] from here on
        levels = self.levels(codes).T.contiguous()
        tried = torch.stack(list(self.beside_scale(scale)), dim=1)
        count = len(hessian) // size
        squares = hessian.reshape(count, size, count, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(squares.double()))
        factor = torch.linalg.cholesky(inverse, upper=True)
        ahead = (factor / factor.diagonal(dim1=1, dim2=2).unsqueeze(2)).triu(1)
        inverse, ahead = (of_blocks.to(hessian.dtype).contiguous() for of_blocks in (inverse, ahead))
        middles = None if table is None else between(table)
        kept = None if keep is None else keep.T.contiguous()
        choose = rescale or rescale_
        choose(slopes, levels, kept, scale, tried, hessian, inverse, ahead, bounds, self.float8, table, middles)
        return Coded(self.codes(levels.T), self.rescaled(scale.T))


@dataclass(frozen=True)
class PowerScaleGrid(ChosenScaleGrid):
    """Scales that are powers of two: exponent [out, groups] float32 whole numbers.

    exponents: the least and the greatest of scales whose multiples float32 holds like any other number. largest: of the
    levels. beside: exponents tried beside the one whose range covers a group.
    """

    spec: Spec
    exponent: Tensor

    by_row: ClassVar[Mapping[str, str | None]] = {"exponent": "int8"}
    exponents: ClassVar[tuple[int, int]]
    largest: ClassVar[float]
    beside: ClassVar[tuple[int, ...]]

    @staticmethod
    @abstractmethod
    def nearest(values: Tensor) -> Tensor:
        """The levels nearest to values in units of their scales."""

    @property
    def scale(self) -> Tensor:
        return torch.exp2(self.exponent)

    def beside_scale(self, old: Tensor) -> Sequence[Tensor]:
        least, most = (2.0**end for end in self.exponents)
        return [old, *((old * factor).clamp(least, most) for factor in (0.5, 2.0))]

    def rescaled(self, scale: Tensor) -> Self:
        return replace(self, exponent=torch.log2(scale).contiguous())

    @classmethod
    def fitted(cls, weight: Tensor, spec: Spec, clip: Clip, importance: Tensor | None) -> Self:
        """Choose the exponents for weight [out, in] float32.

        minmax: the least whose range covers the group, which loses less than the rule of the specification. search: of
        that one and its neighbours the one of least squared error, each input channel weighted by importance [in].
        """

        def exponents(block: Tensor, weigh: Tensor) -> Tensor:
            covering = torch.log2(block.abs().amax(-1) / cls.largest).ceil_().clamp_(*cls.exponents)
            steps = (0,) if clip == "minmax" else (0, *cls.beside)
            scales = [torch.exp2((covering + step).clamp_(*cls.exponents)) for step in steps]
            return torch.log2(best_scale(block, weigh, scales, cls.nearest))

        return cls(spec, by_blocks(weight, spec.group_size, importance, exponents))

    @property
    def scale_bytes(self) -> Tensor:
        """Exponents [out, groups] uint8, as files hold them."""
        return (self.exponent + BIAS).to(torch.uint8)


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


def best_scale(block: Tensor, weigh: Tensor, scales: Sequence[Tensor], nearest: Callable[[Tensor], Tensor]) -> Tensor:
    """Which of `scales`, each [rows, groups], gives a block [rows, groups, size] the least weighted squared error.

    nearest: values in units of the scale to levels.
    """

    def lost(scale: Tensor) -> Tensor:
        scale = scale.unsqueeze(-1)
        return (nearest(block / scale) * scale).sub_(block).square_().mul_(weigh).sum(-1)

    best, least = scales[0], lost(scales[0])
    for tried in scales[1:]:
        loss = lost(tried)
        best, least = torch.where(loss < least, tried, best), torch.minimum(loss, least)
    return best
