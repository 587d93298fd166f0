"""Which weights go: the smallest scores of a group, an exact number of them, ties by position."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Pattern(NamedTuple):
    """n:m sparsity: of every m consecutive inputs of a row, `kept` stay."""

    kept: int
    of: int

    def __str__(self) -> str:
        return f"{self.kept}:{self.of}"


@dataclass(frozen=True)
class Pruned:
    """Matrices some of whose weights are gone.

    weight [out, in] float32, exactly 0 where `keep` [out, in] is False. percdamp: the damping it took, None for none.
    """

    weight: Tensor
    keep: Tensor
    percdamp: float | None = None

    @classmethod
    def of_zeros(cls, weight: Tensor) -> "Pruned":
        """A matrix that was pruned before: what is zero is gone."""
        return cls(weight, weight != 0)

    def columns(self, index: Tensor) -> "Pruned":
        """Some input channels."""
        return Pruned(self.weight[:, index], self.keep[:, index], self.percdamp)

    @classmethod
    def stacked(cls, parts: "Sequence[Pruned]") -> "Pruned":
        """One matrix of parts of its rows."""
        weight, keep = torch.cat([part.weight for part in parts]), torch.cat([part.keep for part in parts])
        return cls(weight, keep, parts[0].percdamp)


def smallest(score: Tensor, drop: int) -> Tensor:
    """Mask [rows, n], True at the `drop` smallest scores of each row; of equal ones those that come first."""
    if drop == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    threshold = torch.kthvalue(score, drop, dim=1, keepdim=True).values
    below = score < threshold
    tied = score == threshold
    missing = drop - below.sum(dim=1, keepdim=True)
    return below | (tied & (tied.cumsum(dim=1) <= missing))


def smallest_of_each(score: Tensor, pattern: Pattern) -> Tensor:
    """Mask [..., m], True at the m - n smallest scores of each run of m; of equal ones those that come first."""
    drop = pattern.of - pattern.kept
    rank = torch.zeros(score.shape, dtype=torch.int8, device=score.device)
    runs = score.unbind(-1)
    for i, one in enumerate(runs):
        for j in range(i):
            first = runs[j] <= one  # the earlier of two equal ones is the smaller
            rank[..., i] += first
            rank[..., j] += ~first
    return rank < drop


def pruned_mask(score: Tensor, sparsity: float, pattern: Pattern | None, whole: bool) -> Tensor:
    """Mask [out, in], True where weights go: by pattern, or the share `sparsity` of each row, or of the whole matrix.

    The number of them is rounded to the nearest one.
    """
    rows, width = score.shape
    if pattern is not None:
        return smallest_of_each(score.view(rows, -1, pattern.of), pattern).view(rows, width)
    if whole:
        return smallest(score.reshape(1, -1), round(sparsity * score.numel())).view(rows, width)
    return smallest(score, round(sparsity * width))
