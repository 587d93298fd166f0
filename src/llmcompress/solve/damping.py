"""The factor that tells how an error in one column is best made up for in the columns after it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompress.errors import RunError

_LADDER = (1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Factor:
    """Upper triangular U [in, in] float32 with (H + damping)^-1 = U^T U, and the damping it took."""

    upper: Tensor
    percdamp: float
    dead: int


def damped(hessian: Tensor, percdamp: float) -> Tensor:
    """H [in, in], in its own type, with percdamp * mean(diagonal) added and dead channels decoupled.

    A dead channel gets the mean diagonal, so it is simply rounded; its weights are kept, since other text may wake it.
    """
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    alive = diagonal[~dead]
    mean = float(alive.mean()) if alive.numel() else 1.0
    added = torch.where(dead, torch.full_like(diagonal, mean), torch.full_like(diagonal, percdamp * mean))
    return hessian + torch.diag(added)


def inverse_factor(hessian: Tensor, percdamp: float) -> Factor:
    """Factor of a mean Gram matrix [in, in], its columns in processing order.

    One Cholesky of the matrix flipped in both directions and one triangular inverse, in float64 (GPTQ,
    arXiv:2210.17323, section 3.3, in the form that never inverts H). If the matrix is not positive definite the
    damping is raised tenfold, twice; RunError after that, never a silent fall back to rounding.
    """
    for step in _LADDER:
        used = percdamp * step
        matrix = damped(hessian.to(torch.float64), used)
        lower, info = torch.linalg.cholesky_ex(torch.flip(matrix, (0, 1)))
        if int(info) == 0:
            right = torch.flip(lower, (0, 1))
            identity = torch.eye(right.shape[0], dtype=right.dtype, device=right.device)
            upper = torch.linalg.solve_triangular(right, identity, upper=True)
            if bool(torch.isfinite(upper).all()):
                return Factor(upper.to(torch.float32), used, int((hessian.diagonal() <= 0).sum()))
    raise RunError(
        f"a Gram matrix of {hessian.shape[0]} inputs is not positive definite even with percdamp {used:g}",
        "use more calibration samples or a larger --percdamp",
    )
