"""Asymmetric calibration: aim at the outputs of the uncompressed model, not at those on inputs that already drifted."""

import torch
from torch import Tensor

from llmcompress.solve.damping import damped


def corrected(weight: Tensor, hessian: Tensor, drift: Tensor, alpha: float) -> Tensor:
    """Weight [out, in] that makes up for the share `alpha` of the error of everything before it.

    hessian [in, in]: mean x x^T. drift [in, in]: mean (x~ - x) x^T. Minimising |Q X - W X~|^2 is, with alpha 1, the
    usual problem for the target W + W D H^-1 (QEP, arXiv:2504.09629). H is damped heavily, so that directions which the
    calibration text hardly shows are not bent.
    """
    return Corrected(weight, correction(weight, hessian, drift), alpha)[:]


def correction(weight: Tensor, hessian: Tensor, drift: Tensor) -> Tensor:
    """W D H^-1 of `corrected`; for a weight [out, in] with more rows than columns D H^-1, which its rows go through."""
    # damped as heavily as this, the matrix has a condition number below its size: float32 is exact enough
    factor = damped(hessian, 1.0).mT  # symmetric, and as LAPACK has it: its factor needs no other memory
    torch.linalg.cholesky(factor, out=factor)
    aims = drift if _tall(weight) else weight.to(torch.float32) @ drift  # whichever has fewer rows to solve for
    # in two steps: `cholesky_solve` would copy the factor
    halfway = torch.linalg.solve_triangular(factor, aims.T, upper=False)
    solved: Tensor = torch.linalg.solve_triangular(factor.mT, halfway, upper=True).T
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
