"""How much errors in a matrix change what a model predicts: the Fisher information of its weights, its diagonal.

To second order the KL divergence between a model and itself with an error D in a matrix is half of D^T F D, F being the
Fisher information. Of F the diagonal is kept, as errors of rounding are all but independent, and of that the sums of
its rows and columns: outputs times inputs, over their total, stands for it (as Kronecker factors do in K-FAC,
arXiv:1503.05671, but each token counts by its own gradient, so that both sums are exact).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Fisher(NamedTuple):
    """Sums of the Fisher information's diagonal [out, in] over tokens, float64 on the CPU.

    outputs: of its rows [out]. inputs: of its columns [in]. Both have the same total.
    """

    outputs: Tensor
    inputs: Tensor

    @property
    def known(self) -> bool:
        """Whether there is any; `UNKNOWN` has none."""
        return self.outputs.numel() > 0

    def plus(self, other: "Fisher") -> "Fisher":
        """The information of the tokens of both."""
        return Fisher(self.outputs + other.outputs, self.inputs + other.inputs)

    def times(self, factor: float) -> "Fisher":
        """Both sums times a factor, such as 1 over the number of tokens."""
        return Fisher(self.outputs * factor, self.inputs * factor)


UNKNOWN = Fisher(torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.float64))
"""Of a matrix that a model runs without gradients."""


def of_matrix(x: Tensor, g: Tensor) -> Fisher:
    """The information of a matrix that reads x [..., in].

    g: gradient of the log-probability at its outputs [..., out].
    """
    return of_squares(_squares(x), _squares(g))


def of_window(gradient: Tensor) -> Fisher:
    """The information of a matrix from its `gradient` [out, in] of the log-probabilities of a window's drawn tokens.

    In expectation it also counts what errors at several tokens together do to a later token, which `of_matrix` leaves
    out. The error of a matrix is the same at all tokens, and early layers are several times as sensitive for it.
    """
    squares = gradient.detach().square()
    return Fisher(squares.sum(dim=1, dtype=torch.float64).to("cpu"), squares.sum(dim=0, dtype=torch.float64).to("cpu"))


def of_squares(x: Tensor, g: Tensor) -> Fisher:
    """The same as `of_matrix` from squares or expected squares: x [tokens, in], g [tokens, out]."""
    return Fisher(
        (x.sum(dim=1, dtype=torch.float64).to(g.dtype) @ g).to("cpu", torch.float64),
        (g.sum(dim=1, dtype=torch.float64).to(x.dtype) @ x).to("cpu", torch.float64),
    )


def of_table(ids: Tensor, g: Tensor, rows: int) -> Fisher:
    """Information of a table [rows, width]: its rows `ids` [tokens] were looked up; gradients g [tokens, width]."""
    squares = _squares(g).to("cpu", torch.float64)
    outputs = torch.zeros(rows, dtype=torch.float64).index_add_(0, ids.cpu(), squares.sum(dim=1))
    return Fisher(outputs, squares.sum(dim=0))


def expected_loss(error: Tensor, outputs: Tensor, inputs: Tensor) -> float:
    """KL divergence that errors [rows, in] cause where the Fisher information is outputs [rows] times inputs [in]."""
    return float(error.square() @ inputs.to(error.dtype) @ outputs.to(error.dtype)) / 2


def coupled_loss(error: Tensor, outputs: Tensor, inputs: Tensor) -> float:
    """The same with a full matrix inputs [in, in], for errors that depend on one another within a row."""
    return float(((error @ inputs.to(error.dtype)) * error).sum(dim=1) @ outputs.to(error.dtype)) / 2


def sampled_rows(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """At most `count` row numbers that stand for all rows, and a weight for each of them. weights: of all rows [rows].

    With more rows than `count`, the sample is spread evenly over the sum of weights: heavy rows come more than once.
    """
    if len(weights) <= count:
        return torch.arange(len(weights)), weights
    ends = weights.cumsum(0)
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count * ends[-1]
    rows = torch.searchsorted(ends, places, right=True).clamp_max_(len(weights) - 1)
    return rows, (ends[-1] / count).expand(count)


def _squares(values: Tensor) -> Tensor:
    return values.detach().reshape(-1, values.shape[-1]).square()
