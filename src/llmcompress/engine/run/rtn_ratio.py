"""The error of a matrix's output, and how it compares with the error that plain rounding makes."""

from collections.abc import Sequence
from functools import partial
from math import isfinite

from torch import Tensor

from llmcompress.grids.base import Spec
from llmcompress.grids.nearest import nearest
from llmcompress.workers import Workers

_PANEL = 512  # columns of a Gram matrix in one product
COMPARED = 256  # rows of a matrix on which its error is compared with that of plain rounding


def output_energies(matrices: Sequence[Tensor], hessian: Tensor, workers: Workers) -> list[float]:
    """tr(R H R^T) of each matrix R [out, in]: its squared output, summed, for inputs of Gram matrix H [in, in]."""
    return workers.distribute(partial(_output_energy, rows, hessian) for rows in matrices)


def against_rtn(weight: Tensor, delta: Tensor, spec: Spec, hessian: Tensor | None, workers: Workers) -> float | None:
    """The output energy of the errors `delta` [out, in] as a share of that of plain rounding.

    Without hessian [in, in], the energy of the errors themselves. None where plain rounding makes no error.
    """
    plain = nearest(weight, spec, workers) - weight
    if hessian is None:
        ours, theirs = (float(rows.square().sum()) for rows in (delta, plain))
    else:
        ours, theirs = workers.together(partial(_output_energy, rows, hessian) for rows in (delta, plain))
    return ours / theirs if theirs > 0 and isfinite(ours / theirs) else None


def _output_energy(rows: Tensor, hessian: Tensor) -> float:
    """tr(R H R^T) by the diagonal blocks of H and twice what is above them: half of the products of all of H."""
    energy, width = 0.0, hessian.shape[0]
    for start in range(0, width, _PANEL):
        stop = min(start + _PANEL, width)
        part = rows[:, start:stop]
        output = part @ hessian[start:stop, start:stop]
        if start:
            output.addmm_(rows[:, :start], hessian[:start, start:stop], alpha=2)
        energy += float(output.mul_(part).sum())
    return energy
