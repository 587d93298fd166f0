"""The best values of the weights that are kept, for a mask that is decided."""

import torch
from torch import Tensor


def refitted(weight: Tensor, target: Tensor, keep: Tensor, hessian: Tensor, steps: int) -> Tensor:
    """Weight [out, in], zero where not `keep`, moved towards the least squared output error against `target`.

    Row by row this minimises (w - t) H (w - t)^T over the kept entries, by `steps` of conjugate gradients with the
    diagonal of H as the preconditioner, all rows at once; no step raises the error of a row. hessian [in, in]: mean
    x x^T, damped. target [out, in].
    """
    diagonal = hessian.diagonal()
    mask = keep.to(weight.dtype)
    found = weight * mask
    residual = ((target - found) @ hessian).mul_(mask)
    scaled = residual / diagonal
    direction = scaled.clone()
    before = (residual * scaled).sum(dim=1)
    for _ in range(steps):
        moved = (direction @ hessian).mul_(mask)
        bend = (direction * moved).sum(dim=1)
        step = torch.where(bend > 0, before / bend, 0.0)[:, None]
        found.addcmul_(step, direction)
        residual.addcmul_(step, moved, value=-1)
        torch.div(residual, diagonal, out=scaled)
        after = (residual * scaled).sum(dim=1)
        share = torch.where(before > 0, after / before, 0.0)[:, None]
        direction.mul_(share).add_(scaled)
        before = after
    return found
