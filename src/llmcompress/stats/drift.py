"""How far an input has drifted from what the uncompressed model has in its place: sum of (x~ - x) x^T over tokens."""

from functools import partial

import torch
from torch import Tensor

from llmcompress.parallel import together
from llmcompress.stats.gram import precision_of, products_of

_PANELS = 4


class Drift:
    """Accumulates sum((X~ - X)^T X) [in, in] in float32; X~ is the input in the uncompressed model, token by token.

    hessian: mean x x^T of just these tokens, where they are fewer than those of the Gram matrix.
    """

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        self.sum = torch.zeros(size, size, dtype=torch.float32, device=device)
        self.tokens = 0
        self.hessian: Tensor | None = None
        self._finished = False

    def update(self, original: Tensor, x: Tensor) -> None:
        """Add a pair of inputs [..., in] of the same tokens; tokens with inf or nan in either are left out."""
        there = original.detach().reshape(-1, original.shape[-1])
        here = x.detach().reshape(-1, x.shape[-1])
        if not bool(torch.isfinite(there.sum() + here.sum())):
            keep = torch.isfinite(there).all(dim=-1) & torch.isfinite(here).all(dim=-1)
            there, here = there[keep], here[keep]
        self.tokens += here.shape[0]
        moved = (there.to(torch.float32) - here.to(torch.float32)).to(here.dtype)
        left, right = products_of(moved, exact=False), products_of(here, exact=False)
        step = -(-self.sum.shape[0] // _PANELS)

        def add(start: int) -> None:
            for one, other in zip(left, right, strict=True):
                self.sum[start : start + step] += one[:, start : start + step].T @ other

        with precision_of(here):
            together(partial(add, start) for start in range(0, self.sum.shape[0], step))

    def mean(self) -> Tensor:
        """The matrix sum((X~ - X)^T X) / tokens [in, in]; not symmetric."""
        return self.sum.clone() if self._finished else self.sum / max(self.tokens, 1)

    def finish(self) -> Tensor:
        """As `mean`, and the sum is given up for it: nothing more can be added."""
        if not self._finished:
            self.sum.div_(max(self.tokens, 1))
            self._finished = True
        return self.sum
