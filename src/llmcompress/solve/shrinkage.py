"""How far the correlations in a Gram matrix are trusted, by how many tokens it was made of."""

from functools import partial

import torch
from torch import Tensor

from llmcompress.grids.nearest import spread
from llmcompress.solve.damping import Factor, backwards, cholesky_, damp, inverse_factor
from llmcompress.workers import SERIAL, Workers

_FLATTERED = 2.0  # a fit of d coefficients to n tokens misses them by so much of d / n less than other text
_TRIED = 0.1  # the share at which the rise is measured
_POWER = 1.25  # of the share to which the rise is about proportional: from 0.9 where channels are much alike to 1.5
_LEAST, _MOST = 0.005, 1.0  # shares: less is not worth a factor of its own, more is next to plain rounding
_COLUMNS = 512  # whose costs are compared


def trusted_factor(
    hessian: Tensor,
    percdamp: float,
    shrinkage: float | None,
    tokens: float,
    workers: Workers = SERIAL,
    order: Tensor | None = None,
) -> Factor:
    """The factor of a mean Gram matrix [in, in] of so many tokens; order: as of `inverse_factor`.

    shrinkage: by which share its diagonal is to grow; None for the chosen one. RunError as of `inverse_factor`.
    """
    chosen = chosen_shrinkage(hessian, percdamp, tokens, workers, order) if shrinkage is None else shrinkage
    return inverse_factor(hessian, percdamp, chosen, workers, order)


def chosen_shrinkage(
    hessian: Tensor, percdamp: float, tokens: float, workers: Workers = SERIAL, order: Tensor | None = None
) -> float:
    """The share by which the diagonal of a mean Gram matrix [in, in] is to grow; order: as of `inverse_factor`.

    An error e in one column, made up for in those after it by a row `a` of a unit triangular matrix, costs e^2 a H a^T:
    least without shrinkage. But a fit of `in` coefficients to n tokens looks better on them than on other text of the
    same kind, by a share of 2 in / n (Akaike, 1974, with the log-likelihood of normal errors). The diagonal grows until
    the costs have risen by that share: what is given up may be chance. 0 where tokens are many. tokens: n.
    """
    allowed = _FLATTERED * hessian.shape[0] / max(tokens, 1.0)
    if allowed < _LEAST:
        return 0.0
    flipped = backwards(hessian, order, hessian.dtype)
    least, more = workers.together(partial(_cost, flipped, percdamp, share) for share in (0.0, _TRIED))
    if least is None or more is None or not least > 0:
        return 0.0
    rise = more / least - 1
    share = _MOST if rise <= 0 else min(_MOST, _TRIED * (allowed / rise) ** (1 / _POWER))
    return share if share >= _LEAST else 0.0


def _cost(flipped: Tensor, percdamp: float, shrinkage: float) -> float | None:
    """The sum of a H a^T over some columns, evenly spread; `a` is of the matrix with damping and shrinkage.

    flipped: H in both directions. None where H with damping is not positive definite, even in float64.
    """
    for dtype in (torch.float32, torch.float64):
        lower = cholesky_(damp(flipped.to(dtype, copy=True), percdamp, shrinkage))
        if lower is not None and bool(torch.isfinite(lower.sum())):
            break
    else:
        return None
    some = torch.arange(len(lower), device=lower.device)[spread(len(lower), _COLUMNS)]
    ahead = lower.new_zeros(len(some), len(lower)).scatter_(1, some[:, None], lower.diagonal()[some, None])
    ahead = torch.linalg.solve_triangular(lower, ahead, upper=False, left=False).to(flipped.dtype)
    return float(((ahead @ flipped) * ahead).sum(dtype=torch.float64))
