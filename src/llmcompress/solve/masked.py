"""The best values of the weights that are kept, for a mask that is decided."""

import torch
from torch import Tensor

from llmcompress.hardware import quick_type

_ROUND = 10  # steps between two looks at the exact error


def refitted(weight: Tensor, target: Tensor, keep: Tensor, hessian: Tensor, steps: int) -> Tensor:
    """Weight [out, in], zero where not `keep`, moved towards the least squared output error against `target`.

    Row by row this minimises (w - t) H (w - t)^T over the kept entries, by `steps` of conjugate gradients with the
    diagonal of H as the preconditioner, all rows at once; no round of them raises the error of a row. hessian [in, in]:
    mean x x^T, damped. target [out, in].
    """
    mask = keep.to(weight.dtype)
    coarse = hessian.to(quick_type(hessian.device))
    found = weight * mask
    missing = target - found
    pull = missing @ hessian
    error = (missing * pull).sum(dim=1)
    for done in range(0, steps, _ROUND):
        moved = found + _conjugate(pull.mul_(mask), mask, hessian.diagonal(), coarse, min(_ROUND, steps - done))
        missing = target - moved
        pull = missing @ hessian
        after = (missing * pull).sum(dim=1)
        better = after < error
        found = torch.where(better[:, None], moved, found)
        if not bool(better.all()):  # as exact as it gets: what rose goes back, and is left there
            mask = mask * better[:, None]
        error = torch.minimum(error, after)
    return found


def _conjugate(residual: Tensor, mask: Tensor, diagonal: Tensor, coarse: Tensor, steps: int) -> Tensor:
    """The change [out, in] that some steps make, from residuals [out, in], which are given up for it.

    The matrix is multiplied in a type of fewer digits: that bends later directions a little, which cost more than they
    gain long before it matters, and the error that remains is looked at exactly after them.
    """
    change = torch.zeros_like(residual)
    scaled = residual / diagonal
    direction = scaled.clone()
    before = (residual * scaled).sum(dim=1)
    for _ in range(steps):
        moved = (direction.to(coarse.dtype) @ coarse).to(mask.dtype).mul_(mask)
        bend = (direction * moved).sum(dim=1)
        step = torch.where(bend > 0, before / bend, 0.0)[:, None]
        change.addcmul_(step, direction)
        residual.addcmul_(step, moved, value=-1)
        torch.div(residual, diagonal, out=scaled)
        after = (residual * scaled).sum(dim=1)
        share = torch.where(before > 0, after / before, 0.0)[:, None]
        direction.mul_(share).add_(scaled)
        before = after
    return change
