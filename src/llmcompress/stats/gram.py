"""The Gram matrix of an input: sum of x x^T over tokens (up to a factor, the Hessian of a linear's squared error)."""

from collections.abc import Sequence
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from llmcompress.mkl import add_product, adds_bfloat16
from llmcompress.stats.finite import Count, only_finite
from llmcompress.stats.panels import owners
from llmcompress.stats.statistic import Statistic
from llmcompress.workers import SERIAL, WHOLE, Part, Workers

_PANEL, PANELS = 192, 8  # columns in a panel at least, and panels at most
_MIRRORED = 128  # columns that are copied across the diagonal at once
_CHUNK = 1024  # tokens in one product of bfloat16
_EXACT = 16384  # tokens after which such products may be rounded


class Gram:
    """Accumulates sum(X^T X) [in, in] in float32 and counts tokens; rows with inf or nan are dropped and counted.

    sum: only the upper triangle is filled in. tokens: rows that were added; `shrink_towards` does not change it. part:
    which panels this rank adds up (stats/panels.py); the threads of `workers` share them. borrowed: the weight, in
    tokens, of what `shrink_towards` has added.
    """

    def __init__(self, size: int, workers: Workers, device: torch.device | None = None, part: Part = WHOLE) -> None:
        self.part, self._workers = part, workers
        self.sum = torch.zeros(size, size, dtype=torch.float32, device=device)
        self._seen = 0
        self._lost: Count = 0
        self.borrowed = 0.0
        self._finished = self._alone = False
        self._diagonal: Tensor | None = None  # where that of the mean was changed
        self._finishing = Lock()  # matrices that read one input are worked on by several threads

    @classmethod
    def of(cls, mean: Tensor, tokens: int, borrowed: float = 0.0) -> "Gram":
        """A Gram matrix whose mean [in, in] float32 is known; nothing more can be added."""
        gram = cls(0, SERIAL, mean.device)
        gram.sum, gram._seen, gram.borrowed, gram._finished = mean, tokens, borrowed, True
        return gram

    @property
    def size(self) -> int:
        return self.sum.shape[0]

    @property
    def sums(self) -> Tensor:
        """Sums of the squares of the channels [in]."""
        return self.sum.diagonal()

    @property
    def tokens(self) -> int:
        return self._seen - int(self._lost)

    @property
    def trusted(self) -> float:
        """Tokens that were added, and the weight of what was borrowed."""
        return self.tokens + self.borrowed

    @property
    def dropped(self) -> int:
        return int(self._lost)

    def update(self, x: Tensor, blank: int = 0) -> None:
        """Add an input [..., in] of any float type. blank: how many of its rows are zeros in place of tokens."""
        every = x.detach().reshape(-1, x.shape[-1])
        (rows,), lost = only_finite(every)
        self._add_upper(rows, exact=self._seen < _EXACT)
        self._seen += every.shape[0] - blank
        self._lost = self._lost + lost

    def _add_upper(self, rows: Tensor, exact: bool) -> None:
        """Panels of the sum's upper triangle += theirs of rows^T rows."""
        products = products_of(rows, exact)

        def add(panel: Tensor) -> None:
            start = self.size - panel.shape[1]
            for part in products:
                add_products(panel, part[:, start : start + panel.shape[0]], part[:, start:])

        self._workers.together(partial(add, panel) for panel in self.views(self.part.number))

    def views(self, number: int) -> list[Tensor]:
        """The panels of the upper triangle that belong to part `number`; each begins at the column of its first row."""
        panels = upper_panels(self.sum)
        whose = owners([panel.shape[1] for panel in panels], self.part.of)
        return [panel for panel, owner in zip(panels, whose, strict=True) if owner == number]

    def mean(self) -> Tensor:
        """The symmetric matrix sum(X^T X) / tokens [in, in], float32."""
        with self._finishing:
            return self._mean() if self._finished else symmetric_mean(self.sum.clone(), self.trusted or 1)

    def finish(self) -> Tensor:
        """As `mean`, but in the memory of the sum: nothing more can be added."""
        with self._finishing:
            if not self._finished:
                symmetric_mean(self.sum, self.trusted or 1)
                self._finished = True
            return self._mean()

    def expect_one(self) -> None:
        """One thread alone asks for the mean from now on, so that it need not be copied to be `lent`."""
        self._alone = True

    def lent(self) -> Tensor:
        """As `finish`, but the diagonal may be changed: the next `mean` or `finish` puts it back."""
        mean = self.finish()
        if not self._alone:
            return mean.clone()
        self._diagonal = mean.diagonal().clone()
        return mean

    def _mean(self) -> Tensor:
        if self._diagonal is not None:
            self.sum.diagonal().copy_(self._diagonal)
            self._diagonal = None
        return self.sum

    def shrink_towards(self, prior: Tensor, weight: float) -> None:
        """Add another mean Gram matrix [in, in] with the weight of so many tokens."""
        self.sum.add_(prior, alpha=weight)  # what is below the diagonal is not looked at
        self.borrowed += weight


def upper_panels(total: Tensor) -> list[Tensor]:
    """Panels that cover the upper triangle of a matrix [n, n]; each begins at the column of its first row."""
    size = total.shape[0]
    step = max(_PANEL, -(-size // PANELS))
    return [total[start : min(start + step, size), start:] for start in range(0, size, step)]


def symmetric_mean(total: Tensor, count: float) -> Tensor:
    """Turn a sum [n, n] whose upper triangle is filled in into the symmetric mean, in place, by blocks."""
    size = total.shape[0]
    for start in range(0, size, _MIRRORED):
        stop = min(start + _MIRRORED, size)
        across, corner = total[start:stop, start:], total[start:stop, start:stop]
        across.div_(count)
        corner.triu_()
        corner += corner.triu(1).T
        total[stop:, start:stop] = total[start:stop, stop:].T
    return total


def add_products(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T right of rows as `products_of` gives them, in place."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left.T, right, out_dtype=torch.float32, out=total)
    elif left.dtype == torch.bfloat16 and adds_bfloat16():
        add_product(total, left, right)
    else:
        total += left.T @ right


def products_of(rows: Tensor, exact: bool) -> Sequence[Tensor]:
    """Rows [tokens, in] cut and cast for products that are summed in float32.

    A GPU and a processor with AMX multiply bfloat16 as it is, exactly. On others products of it are fastest where they
    may return bfloat16, rounded by 2^-9. Over many chunks these roundings average out, to some 2^-13 of the sum for the
    usual 65,536 tokens. Over few tokens they do not average out, and a Gram matrix of few tokens has small eigenvalues
    to lose: there `exact` products are asked for.
    """
    if rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16):
        return (rows,)
    if rows.dtype == torch.bfloat16 and adds_bfloat16():
        return (rows,)
    if rows.dtype == torch.bfloat16 and not exact:
        return torch.split(rows, _CHUNK)
    return (rows.to(torch.float32),)


STATISTIC = Statistic("gram", Gram, multiplied=True)
