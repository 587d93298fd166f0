"""Tensors that hold the matrices of all experts, and how each matrix is cut out of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """What of an expert's share of a stack is a tensor of its own.

    share: the shape of the share as it is stored. turned: it is [in, out]. first, step, count: the rows that are taken,
    of the outputs.
    """

    share: Shape
    turned: bool
    first: int
    step: int
    count: int

    @property
    def shape(self) -> Shape:
        """The shape of what is cut out."""
        return (self.count, *(self.share[:-1] if self.turned else self.share[1:]))

    @property
    def rows(self) -> slice:
        """The outputs that are taken."""
        return slice(self.first, self.first + self.step * self.count, self.step)

    @property
    def whole(self) -> bool:
        """Whether what is cut out lies in one piece, as it is to be read."""
        return not self.turned and self.step == 1

    def of(self, shares: "Tensor") -> "Tensor":
        """What is cut out of shares [..., *share], a view."""
        if self.turned:
            return shares[..., self.rows].mT
        return shares[..., self.rows, :] if len(self.share) == 2 else shares[..., self.rows]


@dataclass(frozen=True)
class ExpertStack:
    """How a tensor holds something of every expert. parts: what each expert has of it, in order of rows.

    flat: the first axis is that of experts and of the rows of each in one. turned: matrices are [in, out]. interleaved:
    rows of the parts take turns.
    """

    experts: int
    parts: tuple[str, ...]
    flat: bool = False
    turned: bool = False
    interleaved: bool = False

    def cuts(self, shape: Shape) -> Iterator[tuple[str, Cut]]:
        """The parts of an expert, of a tensor of this shape."""
        share = (shape[0] // self.experts, *shape[1:]) if self.flat else shape[1:]
        ways = len(self.parts)
        count = share[-1 if self.turned else 0] // ways
        for place, part in enumerate(self.parts):
            first, step = (place, ways) if self.interleaved else (place * count, 1)
            yield part, Cut(share, self.turned, first, step, count)
