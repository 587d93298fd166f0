"""Input channels with outliers: which they are, and what their float16 weights make up for."""

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded
from llmcompress.solve.damping import damped


def remaining(index: Tensor, width: int) -> Tensor:
    """The channels [in - n] int64 that are not among the n of `index`, ascending."""
    rest = torch.ones(width, dtype=torch.bool, device=index.device)
    rest[index[index >= 0]] = False
    return rest.nonzero()[:, 0]


def with_outliers(
    coded: Coded, weight: Tensor, index: Tensor, hessian: Tensor | None = None, keep: Tensor | None = None
) -> Coded:
    """The matrix of which `coded` [out, in - n] is the rest; its outlier channels are those of weight [out, in].

    hessian [in, in]: with it they also take up the error E of the rest as well as they can: W_o + E H_ro H_oo^-1, which
    least squares gives for outputs, with o the outliers and r the rest. keep [out, in]: False where a weight is gone.
    """
    held, rest = index[index >= 0], remaining(index, weight.shape[1])
    outliers = weight[:, held]
    if hessian is not None and held.numel():
        known = damped(hessian[held][:, held], 0.01)
        pull = (weight[:, rest] - coded.decode()) @ hessian[rest][:, held]
        outliers = outliers + torch.linalg.solve(known, pull.T).T
    if keep is not None:
        outliers = outliers * keep[:, held]
    return coded.grid.beside_outliers(coded.codes, index, outliers, weight.shape[1])
