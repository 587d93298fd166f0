"""How far an input has drifted from its counterpart in the uncompressed model: sum of (x~ - x) x^T over tokens."""

from functools import partial
from threading import Lock

import torch
from torch import Tensor

from llmcompress.stats.finite import Count, only_finite
from llmcompress.stats.gram import Gram, add_products, products_of
from llmcompress.stats.panels import owners
from llmcompress.stats.statistic import PairedStatistic
from llmcompress.workers import WHOLE, Part, Workers

_PANELS = 4


class Drift:
    """Accumulates sum((X~ - X)^T X) [in, in] in float32; X~ is the input in the uncompressed model, token by token.

    hessian: mean x x^T of the tokens that both models ran, where the Gram matrix has more tokens. part: which panels
    this rank adds up (stats/panels.py); the threads of `workers` share them.
    """

    def __init__(self, size: int, workers: Workers, device: torch.device | None = None, part: Part = WHOLE) -> None:
        self.part, self._workers = part, workers
        self.sum = torch.zeros(size, size, dtype=torch.float32, device=device)
        self._seen = 0
        self._lost: Count = 0
        self.hessian: Tensor | None = None
        self._finished = self._last = False
        self._finishing = Lock()  # matrices that read one input are worked on by several threads

    def update(self, original: Tensor, x: Tensor) -> None:
        """Add a pair of inputs [..., in] of the same tokens; tokens with inf or nan in either are left out."""
        there = original.detach().reshape(-1, original.shape[-1])
        here = x.detach().reshape(-1, x.shape[-1])
        self._seen += here.shape[0]
        (there, here), lost = only_finite(there, here)
        self._lost = self._lost + lost
        right = products_of(here, exact=False)

        def add(start: int, panel: Tensor) -> None:
            before, now = (rows[:, start : start + panel.shape[0]] for rows in (there, here))
            moved = (before.to(torch.float32) - now.to(torch.float32)).to(here.dtype)
            for one, other in zip(products_of(moved, exact=False), right, strict=True):
                add_products(panel, one, other)

        self._workers.together(partial(add, start, panel) for start, panel in self._panels(self.part.number))

    def original_ended(self, beside: Gram) -> None:
        """Keep the mean of x x^T of the tokens so far: the Gram matrix `beside` will go on without this one."""
        self.hessian = beside.mean()

    @property
    def dropped(self) -> int:
        return int(self._lost)

    @property
    def tokens(self) -> int:
        return self._seen - int(self._lost)

    def views(self, number: int) -> list[Tensor]:
        """The panels of the sum that belong to part `number`."""
        return [panel for _, panel in self._panels(number)]

    def _panels(self, number: int) -> list[tuple[int, Tensor]]:
        """First row and rows of each panel of a part."""
        size = self.sum.shape[0]
        step = -(-size // _PANELS)
        starts = range(0, size, step)
        whose = owners([1] * len(starts), self.part.of)
        return [
            (start, self.sum[start : start + step])
            for start, owner in zip(starts, whose, strict=True)
            if owner == number
        ]

    def expect_last(self) -> None:
        """The next `finish` is the last thing that is asked for: the memory is its caller's alone."""
        self._last = True

    def mean(self) -> Tensor:
        """The matrix sum((X~ - X)^T X) / tokens [in, in]; not symmetric."""
        with self._finishing:
            return self.sum.clone() if self._finished else self.sum / max(self.tokens, 1)

    def finish(self) -> Tensor:
        """As `mean`, but in the memory of the sum: nothing more can be added."""
        with self._finishing:
            if not self._finished:
                self.sum.div_(max(self.tokens, 1))
                self._finished = True
            mean = self.sum
            if self._last:
                self.sum, self.hessian = torch.empty(0, 0), None
            return mean


STATISTIC = PairedStatistic("drift", Drift, beside="gram")
