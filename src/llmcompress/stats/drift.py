"""How far an input has drifted from what the uncompressed model has in its place: sum of (x~ - x) x^T over tokens."""

import torch
from torch import Tensor


class Drift:
    """Accumulates sum((X~ - X)^T X) [in, in] in float32; X~ is the input in the uncompressed model, token by token."""

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        self.sum = torch.zeros(size, size, dtype=torch.float32, device=device)
        self.tokens = 0

    def update(self, original: Tensor, x: Tensor) -> None:
        """Add a pair of inputs [..., in] of the same tokens; tokens with inf or nan in either are left out."""
        there = original.detach().reshape(-1, original.shape[-1])
        here = x.detach().reshape(-1, x.shape[-1])
        if not bool(torch.isfinite(there.sum() + here.sum())):
            keep = torch.isfinite(there).all(dim=-1) & torch.isfinite(here).all(dim=-1)
            there, here = there[keep], here[keep]
        self.tokens += here.shape[0]
        moved = there.to(torch.float32) - here.to(torch.float32)
        if (
            here.dtype == torch.bfloat16
        ):  # a correction, not a factorised matrix: the product's rounding is far below it
            self.sum += moved.to(torch.bfloat16).T @ here
        else:
            self.sum.addmm_(moved.T, here.to(torch.float32))

    def mean(self) -> Tensor:
        """The matrix sum((X~ - X)^T X) / tokens [in, in]; not symmetric."""
        return self.sum / max(self.tokens, 1)
