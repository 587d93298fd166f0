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
    matrix = damped(hessian.to(torch.float64), 1.0)
    right = torch.linalg.solve(matrix, drift.to(torch.float64).T).T  # D H^-1, H symmetric
    moved: Tensor = weight @ right.to(torch.float32)
    return weight + alpha * moved
