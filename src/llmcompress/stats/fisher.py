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

    def plus(self, other: "Fisher") -> "Fisher":
        """Of the tokens of both."""
        return Fisher(self.outputs + other.outputs, self.inputs + other.inputs)

    def times(self, factor: float) -> "Fisher":
        """All of it scaled, as to the mean over tokens."""
        return Fisher(self.outputs * factor, self.inputs * factor)


def of_matrix(x: Tensor, g: Tensor) -> Fisher:
    """Of a matrix that reads x [..., in] and at whose outputs the gradient of the log-probability is g [..., out]."""
    return of_squares(_squares(x), _squares(g))


def of_window(gradient: Tensor) -> Fisher:
    """Of a matrix whose gradient over a window, of the log-probabilities of its drawn tokens, is `gradient` [out, in].

    In expectation also of what errors at several tokens do to a later one together, which `of_matrix` leaves out: the
    error of a matrix is the same at all of them, and early layers are several times as sensitive for it.
    """
    squares = gradient.detach().square()
    return Fisher(squares.sum(dim=1, dtype=torch.float64).to("cpu"), squares.sum(dim=0, dtype=torch.float64).to("cpu"))


def of_squares(x: Tensor, g: Tensor) -> Fisher:
    """The same from squares, or their expected values: x [tokens, in], g [tokens, out]."""
    return Fisher(
        (x.sum(dim=1, dtype=torch.float64).to(g.dtype) @ g).to("cpu", torch.float64),
        (g.sum(dim=1, dtype=torch.float64).to(x.dtype) @ x).to("cpu", torch.float64),
    )


def of_table(ids: Tensor, g: Tensor, rows: int) -> Fisher:
    """Of a table [rows, width] of which the rows `ids` [tokens] were looked up, with gradients g [tokens, width]."""
    squares = _squares(g).to("cpu", torch.float64)
    outputs = torch.zeros(rows, dtype=torch.float64).index_add_(0, ids.cpu(), squares.sum(dim=1))
    return Fisher(outputs, squares.sum(dim=0))


def expected_loss(error: Tensor, outputs: Tensor, inputs: Tensor) -> float:
    """KL divergence that errors [rows, in] cause, for the Fisher information outputs [rows] times inputs [in]."""
    return float(error.square() @ inputs.to(error.dtype) @ outputs.to(error.dtype)) / 2


def coupled_loss(error: Tensor, outputs: Tensor, inputs: Tensor) -> float:
    """The same for inputs [in, in], where errors of a row depend on one another."""
    return float(((error @ inputs.to(error.dtype)) * error).sum(dim=1) @ outputs.to(error.dtype)) / 2


def sampled_rows(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows that stand for all with weights [rows], and the weight of each of them: all rows, if those are `count`.

    Else `count` of them, evenly spread over the sum of the weights: heavy rows come more than once.
    """
    if len(weights) <= count:
        return torch.arange(len(weights)), weights
    ends = weights.cumsum(0)
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count * ends[-1]
    rows = torch.searchsorted(ends, places, right=True).clamp_max_(len(weights) - 1)
    return rows, (ends[-1] / count).expand(count)


def _squares(values: Tensor) -> Tensor:
    return values.detach().reshape(-1, values.shape[-1]).square()
