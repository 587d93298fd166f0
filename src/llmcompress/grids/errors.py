"""How much the errors of rounding a group count: by input channel, or by what they do to the output.

Tensors of rows are [rows, groups, group]. A measure gives the squared error of a difference, and the two inner products
that a least-squares scale is the quotient of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llmcompress.lazy import Tensor, torch

UNKNOWN = 1e-3  # share of the mean energy that every channel has at least, so that its weights keep a sensible scale


class Errors(Protocol):
    """A quadratic measure of errors."""

    def squared(self, delta: Tensor) -> Tensor:
        """Squared error [rows, groups] of a difference, which may be written over."""
        ...

    def products(self, levels: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        """Inner products [rows, groups] of levels with a block, and with themselves."""
        ...


@dataclass(frozen=True)
class ByChannel:
    """Each channel on its own. weigh [1, groups, group]."""

    weigh: Tensor

    def squared(self, delta: Tensor) -> Tensor:
        return delta.square_().mul_(self.weigh).sum(-1)

    def products(self, levels: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        weighted = levels * self.weigh
        return (weighted * block).sum(-1), (weighted * levels).sum(-1)


@dataclass(frozen=True)
class ByOutput:
    """Squared error of the group's part of the output, over all tokens: d H d^T. blocks [groups, group, group]."""

    blocks: Tensor

    @classmethod
    def of(cls, gram: Tensor, group: int) -> ByOutput:
        """Of the Gram matrix of the inputs [in, in], the diagonal blocks of contiguous groups."""
        groups = gram.shape[0] // group
        blocks = torch.stack([gram[k * group : (k + 1) * group, k * group : (k + 1) * group] for k in range(groups)])
        energy = gram.diagonal().mean()
        least = torch.where(energy > 0, UNKNOWN * energy, torch.ones_like(energy))
        return cls(blocks.to(torch.float32) + least * torch.eye(group, device=gram.device))

    def squared(self, delta: Tensor) -> Tensor:
        return (self._outputs(delta) * delta).sum(-1)

    def products(self, levels: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self._outputs(levels)
        return (outputs * block).sum(-1), (outputs * levels).sum(-1)

    def _outputs(self, rows: Tensor) -> Tensor:
        return torch.bmm(rows.transpose(0, 1), self.blocks).transpose(0, 1)
