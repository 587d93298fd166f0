"""Asymmetric calibration: aim at the outputs of the uncompressed model, not at those on inputs that already drifted."""

from functools import partial

import torch
from torch import Tensor

from llmcompress.errors import RunError
from llmcompress.solve.damping import cholesky_, damped, shared_rows
from llmcompress.workers import SERIAL, Workers


def corrected(weight: Tensor, hessian: Tensor, drift: Tensor, alpha: float, workers: Workers = SERIAL) -> Tensor:
    """Weight [out, in] that makes up for the share `alpha` of the error of everything before it.

    hessian [in, in]: mean x x^T. drift [in, in]: mean (x~ - x) x^T. Minimising |Q X - W X~|^2 is, with alpha 1, the
    usual problem for the target W + W D H^-1 (QEP, arXiv:2504.09629). H is damped heavily, so that directions which the
    calibration text hardly shows are not bent.
    """
    return Corrected(weight, correction(weight, hessian, drift, workers), alpha)[:]


def correction(weight: Tensor, hessian: Tensor, drift: Tensor, workers: Workers = SERIAL) -> Tensor:
    """W D H^-1 of `corrected`; for a weight [out, in] with more rows than columns D H^-1, which its rows go through.

    Threads share the work of a large matrix. RunError where H has no factor.
    """
    # damped as heavily as this, the matrix has a condition number below its size: float32 is exact enough
    factor = cholesky_(damped(hessian, 1.0), workers)
    if factor is None:
        raise RunError(
            f"a Gram matrix of {hessian.shape[0]} inputs is not positive definite, however much it is damped",
            "use more calibration samples, or --qep-alpha 0",
        )
    aims = drift if _tall(weight) else weight  # whichever has fewer rows to solve for
    solved = aims.new_empty(aims.shape, dtype=torch.float32)

    def solve(rows: slice) -> None:
        aim = drift[rows] if _tall(weight) else weight[rows].to(torch.float32) @ drift
        # in two steps: `cholesky_solve` would copy the factor
        halfway = torch.linalg.solve_triangular(factor, aim.T, upper=False)
        solved[rows] = torch.linalg.solve_triangular(factor.mT, halfway, upper=True).T

    workers.together(partial(solve, rows) for rows in shared_rows(len(aims), hessian))
    return solved


class Corrected:
    """The corrected rows of a weight [out, in] of any float type, each made when it is asked for."""

    def __init__(self, weight: Tensor, moved: Tensor | None, alpha: float) -> None:
        """moved: its `correction`; None where there is nothing to make up for."""
        self.weight, self.moved, self.alpha = weight, moved, alpha

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def __getitem__(self, part: slice | Tensor) -> Tensor:
        rows = self.weight[part].to(torch.float32)
        if self.moved is None:
            return rows
        return rows + self.alpha * (rows @ self.moved if _tall(self.weight) else self.moved[part])


def _tall(weight: Tensor) -> bool:
    return weight.shape[0] > weight.shape[1]
