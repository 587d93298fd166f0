"""The factor that tells how an error in one column is best made up for in the columns after it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompress.errors import RunError

_LADDER = (1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Factor:
    """(H + damping)^-1 = U^T U with an upper triangular U [in, in], float32, and the damping and shrinkage it took.

    ahead [in, in]: U less its diagonal, each row divided by its pivot: what an error does to the columns after it.
    pivots [in]: the diagonal of U.
    """

    ahead: Tensor
    pivots: Tensor
    percdamp: float
    dead: int
    shrinkage: float = 0.0


def permuted(hessian: Tensor, order: Tensor) -> Tensor:
    """A square matrix [in, in] with rows and columns in `order` [in], in memory of its own."""
    return hessian.index_select(0, order).index_select(1, order)


def damped(hessian: Tensor, percdamp: float, shrinkage: float = 0.0) -> Tensor:
    """H [in, in], in its own type, with percdamp * mean(diagonal) added and dead channels decoupled.

    shrinkage: by which share of itself each entry of the diagonal grows too, so that correlations of channels count for
    less, whatever the channels' energies (shrinkage towards the diagonal, Schäfer and Strimmer, 2005, section 2.4). A
    dead channel gets the mean diagonal, so it is simply rounded; its weights are kept, since other text may wake it.
    """
    return damp(hessian.clone(), percdamp, shrinkage)


def damp(hessian: Tensor, percdamp: float, shrinkage: float = 0.0) -> Tensor:
    """As `damped`, in place."""
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    alive = diagonal[~dead]
    mean = float(alive.mean()) if alive.numel() else 1.0
    diagonal += torch.where(dead, torch.full_like(diagonal, mean), shrinkage * diagonal + percdamp * mean)
    return hessian


def cholesky_(matrix: Tensor) -> Tensor | None:
    """The lower Cholesky factor of a matrix [in, in], in its memory; None where it is not positive definite."""
    lower = matrix.mT  # as LAPACK has it: what is symmetric is the same
    info = torch.empty(0, dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(lower, out=(lower, info))  # in place: a matrix of float64 is the largest thing here
    return lower if int(info) == 0 else None


def inverse_factor(hessian: Tensor, percdamp: float, shrinkage: float = 0.0) -> Factor:
    """Factor of a mean Gram matrix [in, in], `damped`, its columns in processing order.

    One Cholesky of the matrix flipped in both directions in float64, and one triangular inverse in float32, whose
    condition is only the root of the matrix's (GPTQ, arXiv:2210.17323, section 3.3, in the form that never inverts H).
    If the matrix is not positive definite the damping is raised tenfold, twice; RunError after that, never a silent
    fall back to rounding.
    """
    for step in _LADDER:
        used = percdamp * step
        matrix = cholesky_(damp(hessian.flip(0, 1).to(torch.float64), used, shrinkage))
        if matrix is not None:
            # in two steps: a cast that transposes takes three times as long
            lower = matrix.to(torch.float32).contiguous()
            del matrix
            _invert(lower)
            upper = lower.flip(0, 1)
            if bool(torch.isfinite(upper.sum())):
                pivots = upper.diagonal().clone()
                ahead = _above_diagonal_(upper.div_(pivots[:, None]))
                return Factor(ahead, pivots, used, int((hessian.diagonal() <= 0).sum()), shrinkage)
    raise RunError(
        f"a Gram matrix of {hessian.shape[0]} inputs is not positive definite even with percdamp {used:g}",
        "use more calibration samples or a larger --percdamp",
    )


def _above_diagonal_(matrix: Tensor, step: int = 128) -> Tensor:
    """A square matrix in place with zeros on and below its diagonal; `triu_` takes ten times as long."""
    for start in range(0, matrix.shape[0], step):
        rows = matrix[start : start + step]
        rows[:, :start] = 0
        rows[:, start : start + step].triu_(1)
    return matrix


def _invert(lower: Tensor, smallest: int = 192) -> None:
    """Invert a lower triangular matrix [n, n] in place, by halves: a third of the work of solving for the identity."""
    size = lower.shape[0]
    if size <= smallest:
        identity = torch.eye(size, dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, identity, upper=False))
        return
    half = -(-size // 128) * 64
    first, last, corner = lower[:half, :half], lower[half:, half:], lower[half:, :half]
    _invert(first, smallest)
    _invert(last, smallest)
    corner.copy_((last @ corner).neg_() @ first)
