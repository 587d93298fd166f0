"""Inputs in int8, as checkpoints of LLM.int8() are run: rounded token by token, but for channels with outliers.

The products of codes are sums of whole numbers, so that rounding the inputs and multiplying decoded values gives what
an int8 kernel gives, up to the order of sums.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

_LIMIT = 127


@dataclass(frozen=True)
class ByThreshold:
    """Channels [in] in which any |x| of an input reaches `threshold` stay as they are, as bitsandbytes has it."""

    threshold: float

    integers: ClassVar[bool] = False

    def rounded(self, x: Tensor) -> Tensor:
        """x [..., in]; values that reach the threshold widen no token's step, the others of their channels do."""
        large = x.abs() >= self.threshold
        step = x.masked_fill(large, 0).abs().amax(dim=-1, keepdim=True).to(torch.float32) / _LIMIT
        return _rounded(x, step, large.reshape(-1, x.shape[-1]).any(dim=0))

    def to(self, device: torch.device | str) -> "ByThreshold":
        """The same on another device."""
        return self


@dataclass(frozen=True)
class BesideOutliers:
    """The channels index [k] int64 stay as they are."""

    index: Tensor

    integers: ClassVar[bool] = False

    def rounded(self, x: Tensor) -> Tensor:
        """x [..., in]; the channels that stay widen no token's step."""
        kept = torch.zeros(x.shape[-1], dtype=torch.bool, device=x.device)
        kept[self.index] = True
        step = x.masked_fill(kept, 0).abs().amax(dim=-1, keepdim=True).to(torch.float32) / _LIMIT
        return _rounded(x, step, kept)

    def to(self, device: torch.device | str) -> "BesideOutliers":
        """The same on another device."""
        return BesideOutliers(self.index.to(device))


def _rounded(x: Tensor, step: Tensor, kept: Tensor) -> Tensor:
    codes = (x.to(torch.float32) * torch.where(step > 0, 1 / step, 0.0)).round_().clamp_(-_LIMIT, _LIMIT)
    return torch.where(kept, x, codes.mul_(step).to(x.dtype))
