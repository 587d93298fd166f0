"""The energy of an input: sums of squares of its channels over tokens, the diagonal of its Gram matrix."""

from typing import NamedTuple

import torch
from torch import Tensor

from llmcompress.stats.statistic import Statistic


class Energy(NamedTuple):
    """sums: of the squares of each channel [in], float64, on the CPU.

    tokens: how many were counted. dropped: how many were left out for inf or nan.
    """

    sums: Tensor
    tokens: int
    dropped: int

    @classmethod
    def none(cls, size: int) -> "Energy":
        """The energy of no tokens."""
        return cls(torch.zeros(size, dtype=torch.float64), 0, 0)

    def mean(self) -> Tensor:
        """Mean square of each channel [in], float32."""
        return (self.sums / max(self.tokens, 1)).to(torch.float32)

    def plus(self, other: "Energy") -> "Energy":
        """The energy of the tokens of both."""
        return Energy(self.sums + other.sums, self.tokens + other.tokens, self.dropped + other.dropped)


def energy(x: Tensor) -> Energy:
    """The energy of an input [..., in] of any float type, squared and summed in float32."""
    squares = x.detach().reshape(-1, x.shape[-1]).to(torch.float32).square()
    tokens = squares.shape[0]
    sums = squares.sum(dim=0)
    if not bool(torch.isfinite(sums).all()):
        squares = squares[torch.isfinite(squares).all(dim=-1)]
        sums = squares.sum(dim=0)
    return Energy(sums.to("cpu", torch.float64), squares.shape[0], tokens - squares.shape[0])


class Squares:
    """Accumulates the energy of an input."""

    def __init__(self, known: Energy) -> None:
        self.energy = known

    @property
    def sums(self) -> Tensor:
        """Sums of the squares of the channels [in]."""
        return self.energy.sums

    @property
    def tokens(self) -> int:
        return self.energy.tokens

    @property
    def dropped(self) -> int:
        return self.energy.dropped

    def update(self, x: Tensor) -> None:
        """Add an input [..., in] of any float type."""
        self.energy = self.energy.plus(energy(x))


STATISTIC = Statistic("squares", lambda size, workers, device, part: Squares(Energy.none(size)), unless="gram")
