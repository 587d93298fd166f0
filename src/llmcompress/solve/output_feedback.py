"""Feedback over outputs: what the error of a row does to the prediction is made up for in the rows after it.

To second order, the divergence that an error E [out, in] of a matrix causes is tr(O E H E^T), with the Gram matrix H of
its inputs and O of the gradients at its outputs (YAQA, arXiv:2505.22988, section 3; O is the identity in GPTQ). With
O = C^T D C, C being lower triangular and of unit diagonal, it is the sum over rows of D_i times the error of
e_i + sum_{j<i} C_ij e_j. Rows that are decided one after another are problems of GPTQ's own, whose targets are
w_i - sum_{j<i} C_ij e_j. Here some rows are decided at a time, among which nothing is made up for.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded
from llmcompress.solve.correct import Corrected
from llmcompress.workers import Workers

OUTPUTS = 1024  # rows between which errors are made up for: products of more gradients would outgrow the matrix
AT_ONCE, STEPS = 16, 32  # rows of them at most that are decided at a time; and a share of them
DAMPING = 0.1  # of the products' mean square: these are sums over tokens of little text
_TOGETHER = 4  # runs of rows, at least, whose steps are taken together: what a step costs hardly depends on its rows

Solve = Callable[[Tensor, Tensor], Coded]
"""Codes of rows, by their numbers [n] and what they are to be [n, in]."""


def chunks(outputs: int) -> list[slice]:
    """The runs of a matrix's rows between which errors are made up for."""
    return [slice(start, min(start + OUTPUTS, outputs)) for start in range(0, outputs, OUTPUTS)]


def products_bytes(outputs: int) -> int:
    """Bytes of the products of gradients at the outputs of a matrix."""
    return sum(4 * (some.stop - some.start) ** 2 for some in chunks(outputs))


def solved_with_feedback(products: Sequence[Tensor], aim: Corrected | Tensor, solve: Solve, workers: Workers) -> Coded:
    """Codes of all rows of `aim` [out, in], those that matter most first.

    products: mean products [n, n] of the gradients at the outputs of each run of rows, in order. Runs know nothing of
    one another; threads and ranks share them where there are more than `_TOGETHER`.
    """
    starts = accumulate((len(square) for square in products[:-1]), initial=0)
    runs = list(zip(products, starts, strict=True))
    size = max(_TOGETHER, len(runs) // 8)
    parts = (runs[start : start + size] for start in range(0, len(runs), size))
    found = workers.distribute(partial(_solved, part, aim, solve) for part in parts)
    return Coded.stacked([coded for coded, _ in found]).rows(torch.cat([rows for _, rows in found]).argsort())


class _Run:
    """A run of rows, some of which are decided. factor: C of its rows in order. errors: of the rows decided.

    size: how many rows are decided at a time.
    """

    def __init__(self, products: Tensor, start: int, width: int) -> None:
        square = products.to(torch.float64)
        mean = square.diagonal().mean()
        square = square + (DAMPING * mean if mean > 0 else 1.0) * torch.eye(len(square), device=square.device)
        order = square.diagonal().argsort(descending=True, stable=True)
        # C^T D C: an upper triangle times its transpose, which is the factor of the matrix turned around
        upper = torch.linalg.cholesky(square[order][:, order].flip(0, 1)).flip(0, 1)
        self.factor = (upper / upper.diagonal()).T.to(torch.float32)
        self.rows, self.size = order + start, max(1, min(AT_ONCE, len(order) // STEPS))
        self.errors = torch.zeros(len(order), width, device=order.device)

    def step(self, number: int) -> slice:
        """The rows, in order, that are decided by a step."""
        return slice(number * self.size, (number + 1) * self.size)

    def pull(self, step: slice) -> Tensor:
        """What is taken from the aims of the rows of a step."""
        pull: Tensor = self.factor[step, : step.start] @ self.errors[: step.start]
        return pull


def _solved(part: list[tuple[Tensor, int]], aim: Corrected | Tensor, solve: Solve) -> tuple[Coded, Tensor]:
    """Codes of the rows of some runs, and which rows they are. part: products of each run, and its first row."""
    runs = [_Run(products, start, aim.shape[1]) for products, start in part]
    decided, rows = [], []
    for number in range(max(-(-len(run.rows) // run.size) for run in runs)):
        steps = [(run, run.step(number)) for run in runs if run.step(number).start < len(run.rows)]
        numbers = [run.rows[step] for run, step in steps]
        rows.append(torch.cat(numbers))
        wanted = aim[rows[-1]]
        decided.append(solve(rows[-1], wanted - torch.cat([run.pull(step) for run, step in steps])))
        errors = decided[-1].decode().sub_(wanted)
        for (run, step), error in zip(steps, torch.split(errors, [len(some) for some in numbers]), strict=True):
            run.errors[step] = error
    return Coded.stacked(decided), torch.cat(rows)
