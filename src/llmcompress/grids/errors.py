"""How much the errors of rounding a group count: by input channel, or by what they do to the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcompress.lazy import Tensor, torch

if TYPE_CHECKING:
    from llmcompress.grids.base import Clip

UNKNOWN = 1e-3  # share of the mean energy that every channel has at least, so that its weights keep a sensible scale


@dataclass(frozen=True)
class Errors:
    """A quadratic measure of the errors of groups, for tensors of rows [rows, groups, group].

    weigh [1, groups, group]: of every channel; or, `by_output`, the blocks H [groups, group, group] of d H d^T, the
    squared error of the group's part of the output over all tokens.
    """

    weigh: Tensor
    by_output: bool

    @classmethod
    def of(cls, weight: Tensor, group: int, clip: Clip, importance: Tensor | None, gram: Tensor | None) -> Errors:
        """Of contiguous groups of weight [out, in]: of outputs where ranges are clipped by them, else by channel.

        importance [in]: None for all channels alike. gram [in, in]: of the inputs. TypeError for outputs without it.
        """
        width = weight.shape[1]
        if clip != "output":
            weigh = torch.ones(width, device=weight.device) if importance is None else importance.to(torch.float32)
            return cls(positive(weigh).view(1, -1, group), by_output=False)
        if gram is None:
            raise TypeError("the error of outputs is measured by the Gram matrix of the inputs")
        starts = range(0, width, group)
        blocks = torch.stack([gram[start : start + group, start : start + group] for start in starts])
        energy = gram.diagonal().mean()
        least = torch.where(energy > 0, UNKNOWN * energy, torch.ones_like(energy))
        return cls(blocks.to(torch.float32) + least * torch.eye(group, device=gram.device), by_output=True)

    def squared(self, delta: Tensor) -> Tensor:
        """Squared error [rows, groups] of a difference, which may be written over."""
        from llmcompress.grids.scripted_search import squared

        return squared(delta, self.weigh, self.by_output)

    def products(self, levels: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        """Inner products [rows, groups] of levels with a block, and with themselves."""
        from llmcompress.grids.scripted_search import products

        return products(levels, block, self.weigh, self.by_output)


def positive(weigh: Tensor) -> Tensor:
    """Channels that were never active still count a little, so that their weights keep a sensible scale."""
    mean = weigh.mean()
    return torch.ones_like(weigh) if mean <= 0 else weigh + UNKNOWN * mean
