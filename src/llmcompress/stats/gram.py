"""The Gram matrix of an input: sum of x x^T over tokens (up to a factor, the Hessian of a linear's squared error)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_PANELS = 4


class Gram:
    """Accumulates sum(X^T X) [in, in] in float32 and counts tokens; rows with inf or nan are dropped and counted.

    sum: only its upper triangle is filled in. tokens: rows that entered; `shrink_towards` does not change it.
    """

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        self.sum = torch.zeros(size, size, dtype=torch.float32, device=device)
        self.tokens = 0
        self.dropped = 0
        self._borrowed = 0.0

    @property
    def size(self) -> int:
        return self.sum.shape[0]

    def update(self, x: Tensor) -> None:
        """Add an input [..., in] of any float type."""
        rows = x.detach().reshape(-1, x.shape[-1])
        if not bool(torch.isfinite(rows.sum())):  # one reduction per batch; the exact test only where it fails
            keep = torch.isfinite(rows).all(dim=-1)
            self.dropped += int((~keep).sum())
            rows = rows[keep]
        self.tokens += rows.shape[0]
        _add_upper(self.sum, rows.to(torch.float32), rows.dtype)

    def mean(self) -> Tensor:
        """The symmetric matrix sum(X^T X) / tokens [in, in], float32."""
        upper = torch.triu(self.sum)
        return (upper + torch.triu(upper, 1).T) / ((self.tokens + self._borrowed) or 1)

    def shrink_towards(self, prior: Tensor, weight: float) -> None:
        """Add `weight` tokens' worth of another mean Gram matrix [in, in]."""
        self.sum += torch.triu(prior) * weight
        self._borrowed += weight


def _add_upper(total: Tensor, rows: Tensor, origin: torch.dtype) -> None:
    """total [in, in] += rows^T rows, upper triangle only, in column panels; rows [tokens, in] float32.

    Rows that came from bfloat16 lose nothing in a bfloat16 product with float32 accumulation, which is several times
    faster where the processor has one. float16 has three bits more, which only a TF32 product keeps.
    """
    size = total.shape[0]
    step = -(-size // _PANELS)
    with _products_of(origin, total.device):
        for start in range(0, size, step):
            stop = min(start + step, size)
            total[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:])


@contextmanager
def _products_of(origin: torch.dtype, device: torch.device) -> Iterator[None]:
    """Within, float32 products may round their inputs to what `origin` holds anyway, and to nothing coarser."""
    cuda = device.type == "cuda"
    backend: Any = torch.backends.cuda.matmul if cuda else getattr(torch.backends.mkldnn, "matmul", None)
    if not hasattr(backend, "fp32_precision"):  # before torch 2.9, where the default is exact
        yield
        return
    if origin == torch.bfloat16:
        precision = "tf32" if cuda else "bf16"
    else:
        precision = "tf32" if cuda and origin == torch.float16 else "ieee"
    before = backend.fp32_precision
    backend.fp32_precision = precision
    try:
        yield
    finally:
        backend.fp32_precision = before
