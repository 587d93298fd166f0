"""The Gram matrix of an input: sum of x x^T over tokens (up to a factor, the Hessian of a linear's squared error)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmcompress.parallel import together

_PANEL, _PANELS = 192, 8  # columns in a panel at least, and panels at most
_CHUNK = 1024  # tokens in one product of bfloat16
_EXACT = 16384  # tokens after which such products may be rounded


class Gram:
    """Accumulates sum(X^T X) [in, in] in float32 and counts tokens; rows with inf or nan are dropped and counted.

    sum: only its upper triangle is filled in. tokens: rows that entered; `shrink_towards` does not change it.
    """

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        self.sum = torch.zeros(size, size, dtype=torch.float32, device=device)
        self.tokens = 0
        self.dropped = 0
        self._borrowed = 0.0
        self._finished = False

    @classmethod
    def of(cls, mean: Tensor, tokens: int) -> "Gram":
        """The statistics whose mean [in, in] float32 is known; nothing more can be added."""
        gram = cls(0, mean.device)
        gram.sum, gram.tokens, gram._finished = mean, tokens, True
        return gram

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
        _add_upper(self.sum, rows, exact=self.tokens < _EXACT)
        self.tokens += rows.shape[0]

    def mean(self) -> Tensor:
        """The symmetric matrix sum(X^T X) / tokens [in, in], float32."""
        return self.sum if self._finished else self._averaged(self.sum.clone())

    def finish(self) -> Tensor:
        """As `mean`, and the sum is given up for it: nothing more can be added."""
        if not self._finished:
            self._averaged(self.sum)
            self._finished = True
        return self.sum

    def _averaged(self, total: Tensor) -> Tensor:
        """Turn a sum of which the upper triangle counts into the symmetric mean, in place."""
        total.triu_()
        total += total.triu(1).T
        return total.div_((self.tokens + self._borrowed) or 1)

    def shrink_towards(self, prior: Tensor, weight: float) -> None:
        """Add `weight` tokens' worth of another mean Gram matrix [in, in]."""
        self.sum += torch.triu(prior) * weight
        self._borrowed += weight


def _add_upper(total: Tensor, rows: Tensor, exact: bool) -> None:
    """total [in, in] float32 += rows^T rows, upper triangle only, in panels of columns that threads share out."""
    size = total.shape[0]
    step = max(_PANEL, -(-size // _PANELS))
    products = products_of(rows, exact)

    def add(start: int, stop: int) -> None:
        for part in products:
            total[start:stop, start:] += part[:, start:stop].T @ part[:, start:]

    with precision_of(rows):
        together(partial(add, start, min(start + step, size)) for start in range(0, size, step))


def products_of(rows: Tensor, exact: bool) -> Sequence[Tensor]:
    """Rows [tokens, in] cut and cast for products that are summed in float32.

    On a processor products of bfloat16 are fastest where they may return bfloat16, rounded by 2^-9. Over many chunks
    these roundings average out, to some 2^-13 of the sum for the usual 65,536 tokens. Of few tokens they would not,
    and a Gram matrix of few tokens has small eigenvalues to lose: so where it matters, ask for exact ones.
    """
    if rows.dtype == torch.bfloat16 and rows.device.type == "cpu" and not exact:
        return torch.split(rows, _CHUNK)
    return (rows.to(torch.float32),)


@contextmanager
def precision_of(rows: Tensor) -> Iterator[None]:
    """Within, float32 products may round their inputs to what the rows hold anyway, and to nothing coarser."""
    cuda = rows.device.type == "cuda"
    backend: Any = torch.backends.cuda.matmul if cuda else getattr(torch.backends.mkldnn, "matmul", None)
    if not hasattr(backend, "fp32_precision"):  # before torch 2.9, where the default is exact
        yield
        return
    before = backend.fp32_precision
    if rows.dtype == torch.bfloat16:
        precision = "tf32" if cuda else "bf16"
    else:
        precision = "tf32" if cuda and rows.dtype == torch.float16 else "ieee"
    backend.fp32_precision = precision
    try:
        yield
    finally:
        backend.fp32_precision = before
