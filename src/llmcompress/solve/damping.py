"""The factor that tells how an error in one column is best made up for in the columns after it."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from llmcompress.errors import RunError
from llmcompress.workers import SERIAL, Workers

_LADDER = (1.0, 10.0, 100.0)
WHOLE = 1024  # columns of a matrix that one thread works on
_STRIP = 512  # rows that are put in order at once
_SOLVED = 192  # columns of a triangle that is inverted as LAPACK does
_PARTS = 4  # of a larger matrix's halves


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


def permuted(hessian: Tensor, order: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A square matrix [in, in] with rows and columns in `order` [in], in memory of its own; dtype: None for the same.

    A strip at a time, so that nothing else is as large as the result.
    """
    found = torch.empty_like(hessian, dtype=dtype)
    for rows, strip in zip(torch.split(order, _STRIP), torch.split(found, _STRIP), strict=True):
        strip.copy_(hessian.index_select(0, rows).index_select(1, order))
    return found


def backwards(hessian: Tensor, order: Tensor | None, dtype: torch.dtype) -> Tensor:
    """As `permuted`, from the last row and column to the first; order: None as they are."""
    forwards = torch.arange(len(hessian), device=hessian.device) if order is None else order
    return permuted(hessian, forwards.flip(0), dtype)


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


def cholesky_(matrix: Tensor, workers: Workers | None = None) -> Tensor | None:
    """The lower Cholesky factor of a matrix [in, in], in its memory; None where it is not positive definite.

    workers: share a large one on a processor, which is cut into parts; None leaves it to LAPACK.
    """
    lower = matrix.mT  # as LAPACK has it: what is symmetric is the same
    return lower if _factorise(lower, workers) else None


def _factorise(lower: Tensor, workers: Workers | None) -> bool:
    """Turn a matrix [n, n], of which the lower triangle is looked at, into its factor; False where it has none."""
    size = lower.shape[0]
    if workers is None or not is_shared(lower):
        info = torch.empty(0, dtype=torch.int32, device=lower.device)
        torch.linalg.cholesky_ex(lower, out=(lower, info))  # in place: a matrix of float64 is the largest thing here
        return int(info) == 0
    half = -(-size // 128) * 64
    first, corner, last = lower[:half, :half], lower[half:, :half], lower[half:, half:]
    if not _factorise(first, workers):
        return False

    whole = first.mT.contiguous().mT  # as LAPACK has it: twice as fast to solve with

    def solve(rows: slice) -> None:
        corner[rows] = torch.linalg.solve_triangular(whole, corner[rows].mT, upper=False).mT

    def subtract(rows: slice) -> None:
        last[rows, : rows.stop].addmm_(corner[rows], corner[: rows.stop].mT, alpha=-1)

    parts = _quarters(size - half)
    workers.together(partial(solve, rows) for rows in parts)
    workers.together(partial(subtract, rows) for rows in reversed(parts))  # the longest first
    last_has_factor = _factorise(last, workers)
    lower[:half, half:] = 0
    return last_has_factor


def is_shared(square: Tensor) -> bool:
    """Whether threads share work on a square matrix: on a processor, where it is large."""
    return square.shape[0] > WHOLE and not square.is_cuda


def is_alone(square: Tensor) -> bool:
    """Whether work on a square matrix is done alone: where threads share it, and on a GPU, which shares it itself."""
    return square.is_cuda or is_shared(square)


def shared_rows(count: int, square: Tensor) -> list[slice]:
    """Parts of `count` rows, or columns, that are worked on with a square matrix: one where threads do not share it."""
    return _quarters(count) if is_shared(square) else [slice(0, count)]


def _quarters(size: int) -> list[slice]:
    """Parts of a large matrix's rows or columns, whatever the number of threads that share them."""
    step = -(-size // _PARTS)
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def inverse_factor(
    hessian: Tensor,
    percdamp: float,
    shrinkage: float = 0.0,
    workers: Workers = SERIAL,
    order: Tensor | None = None,
) -> Factor:
    """Factor of a mean Gram matrix [in, in], `damped`; threads share the work.

    order: in which its columns [in] are processed; None as they are.

    One Cholesky of the matrix flipped in both directions in float64, and one triangular inverse in float32, whose
    condition is only the root of the matrix's (GPTQ, arXiv:2210.17323, section 3.3, in the form that never inverts H).
    If the matrix is not positive definite the damping is raised tenfold, twice; RunError after that, never a silent
    fall back to rounding.
    """
    for step in _LADDER:
        used = percdamp * step
        matrix = cholesky_(damp(backwards(hessian, order, torch.float64), used, shrinkage), workers)
        if matrix is not None:
            # in two steps: a cast that transposes takes three times as long
            cast = matrix.to(torch.float32)
            del matrix
            lower = cast.contiguous()
            del cast
            _invert(lower, workers)
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


def _invert(lower: Tensor, workers: Workers) -> None:
    """Invert a lower triangular matrix [n, n] in place, by halves: a third of the work of solving for the identity."""
    size = lower.shape[0]
    if size <= _SOLVED:
        identity = torch.eye(size, dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, identity, upper=False))
        return
    half = -(-size // 128) * 64
    first, corner, last = lower[:half, :half], lower[half:, :half], lower[half:, half:]
    if not is_shared(lower):
        _invert(first, workers)
        _invert(last, workers)
        corner.copy_((last @ corner).neg_() @ first)
        return
    workers.together(partial(_invert, part, SERIAL) for part in (first, last))
    moved = torch.empty_like(corner)

    def before(rows: slice) -> None:  # the triangles' zeros are left out
        torch.mm(last[rows, : rows.stop], corner[: rows.stop], out=moved[rows])

    def after(columns: slice) -> None:
        corner[:, columns] = (moved[:, columns.start :] @ first[columns.start :, columns]).neg_()

    workers.together(partial(before, rows) for rows in reversed(_quarters(size - half)))
    workers.together(partial(after, columns) for columns in _quarters(half))
