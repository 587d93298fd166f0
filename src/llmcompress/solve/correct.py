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
    # damped as heavily as this, the matrix has a condition number below its size: float32 is exact enough
    factor = damped(hessian, 1.0)
    torch.linalg.cholesky(factor, out=factor)
    if len(weight) > len(hessian):  # W (D H^-1) or (W D) H^-1, whichever has fewer rows to solve for
        moved = weight @ torch.cholesky_solve(drift.T, factor).T
    else:
        moved = torch.cholesky_solve((weight @ drift).T, factor).T
    return weight + alpha * moved
