"""Scales of groups: in which values they can be stored, and which are best for codes that are fixed."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcompress.grids.coded import Coded, Grid
from llmcompress.lazy import Tensor, torch

if TYPE_CHECKING:
    from typing import Self

    from llmcompress.grids.base import Spec

SMALLEST_SCALE = 2.0**-24  # smallest positive float16


@dataclass(frozen=True)
class ScaledGrid(Grid):
    """A grid whose groups have one scale each, free to be any that can be stored."""

    @abstractmethod
    def rescaled(self, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> Self:
        """The grid with other scales [out, groups], moved to storable ones, in the rows where `rows` [out] is true.

        dtype: in which scales are stored, if that is a matter of choice.
        """

    @property
    def factor_index(self) -> Tensor | None:
        joined = self.spec.joins_rows or self.spec.joins_matrices
        return None if joined else self.group_index

    def multiplied(self, factors: Tensor, scale_dtype: torch.dtype) -> Self:
        everywhere = torch.ones(len(factors), dtype=torch.bool, device=factors.device)
        return self.rescaled(self.scale * factors, everywhere, scale_dtype)

    def refit(self, codes: Tensor, hessian: Tensor, gradient: Tensor, scale_dtype: torch.dtype) -> Coded:
        """Least-squares scales of every row for its codes; rows that would not gain keep theirs."""
        square, slope = scale_loss(codes, self, hessian, gradient)
        rows, groups = slope.shape
        ridge = 1e-4 * square.diagonal(dim1=1, dim2=2).mean(dim=1).clamp_min(1e-30)  # groups whose codes are all zero
        eye = torch.eye(groups, device=codes.device)
        step = torch.linalg.solve(square + ridge[:, None, None] * eye, slope)
        everywhere = torch.ones(rows, dtype=torch.bool, device=codes.device)
        wanted = torch.where(torch.isfinite(step), self.scale + step, self.scale)
        scale = self.rescaled(wanted, everywhere, scale_dtype).scale
        return Coded(codes, self.rescaled(scale, gains(square, slope, scale - self.scale) > 0, scale_dtype))


def gains(square: Tensor, slope: Tensor, step: Tensor) -> Tensor:
    """2 b^T d - d^T A d of every row [out]; square A [out, groups, groups], slope b and step d [out, groups]."""
    return (2 * slope - torch.einsum("rgh,rh->rg", square, step)).mul_(step).sum(dim=1)


def scale_loss(codes: Tensor, grid: Grid, hessian: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """A [out, groups, groups] and b [out, groups] of 2 b^T d - d^T A d, by how much a step d of a row's scales gains.

    With C the codes of a row spread over its groups [in, groups], A = C^T H C and b = C^T H (w - q). gradient
    [out, in]: (W - Q) H.
    """
    groups = grid.scale.shape[1]
    centred = grid.levels(codes)
    if bool((grid.group_index.diff() < 0).any()):  # groups in another order: columns of a group side by side
        together = torch.argsort(grid.group_index, stable=True)
        centred, gradient = centred[:, together], gradient[:, together]
        hessian = hessian[together][:, together]
    rows, width = centred.shape
    size = width // groups
    slope = (centred * gradient).view(rows, groups, size).sum(dim=2)  # [out, groups]
    square = torch.empty(rows, groups, groups, device=centred.device)
    work = torch.empty(rows * width, device=centred.device)  # of all groups: fresh memory costs as much as arithmetic
    for group in range(groups):
        start = group * size
        right = work[: rows * (width - start)].view(rows, width - start)
        torch.mm(centred[:, start : start + size], hessian[start : start + size, start:], out=right)
        right.mul_(centred[:, start:])
        square[:, group, group:] = square[:, group:, group] = right.view(rows, groups - group, size).sum(dim=2)
    return square, slope


def storable(scale: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Round scales to values that `dtype` and float16 both hold exactly; float32 in, float32 out, sign kept.

    bfloat16 first, float16 second: the same codes can then be written with either type of scale.
    """
    from llmcompress.grids.scripted_search import stored

    return stored(scale, dtype == torch.bfloat16)


def float16(value: Tensor) -> Tensor:
    """Values rounded to float16, within its range, as float32."""
    return value.clamp(-65504.0, 65504.0).to(torch.float16).to(torch.float32)


def between(levels: Tensor) -> Tensor:
    """Midpoints of levels that ascend along the last dimension: a value on one belongs to the level above."""
    return (levels[..., 1:] + levels[..., :-1]) / 2


def natural_groups(spec: Spec, in_features: int) -> Tensor:
    """group_index [in] of contiguous groups."""
    return natural(in_features, spec.width(in_features))


def natural(in_features: int, size: int) -> Tensor:
    """group_index [in] of contiguous groups of `size` channels."""
    return torch.arange(in_features) // size
