"""Values to the nearest levels of a grid of single codes, within loops that TorchScript runs."""

import torch
from torch import Tensor

from llmcompress.scripted import scripted


def snapped_(
    level: Tensor,
    group: int,
    bounds: tuple[Tensor, Tensor] | None,
    float8: bool,
    table: Tensor | None,
    between: Tensor | None,
) -> None:
    """Move values [..., out] in units of their scale to the nearest levels, in place.

    Values are [out] where each row has its table. group: the row of bounds [groups, out] that holds. float8, table,
    between: as in `Levels` of the column sweep.
    """
    if bounds is not None:
        torch.clamp(level, bounds[0][group], bounds[1][group], out=level)  # bounds are levels: rounding stays within
        if float8:
            level.copy_(level.to(torch.float8_e4m3fn)).add_(0.0)  # zero is never negative
        else:
            level.round_()
    elif table is not None and between is not None:
        if table.dim() == 2:  # one for each row
            place = torch.searchsorted(between, level.unsqueeze(1), right=True)
            level.copy_(table.gather(1, place).squeeze(1))
        else:
            torch.take(table, torch.bucketize(level, between, right=True), out=level)


snap_ = scripted(snapped_)


@scripted
def rescale_(
    slopes: Tensor,
    levels: Tensor,
    keep: Tensor | None,
    scale: Tensor,
    tried: Tensor,
    hessian: Tensor,
    inverse: Tensor,
    ahead: Tensor,
    bounds: tuple[Tensor, Tensor] | None,
    float8: bool,
    table: Tensor | None,
    between: Tensor | None,
) -> None:
    """Group after group, give each row the best of some scales and the codes that it asks for, in place.

    slopes [in, out]: of the loss, which follow the moves. levels [in, out]. keep [in, out]: 1, or 0 for weights that
    are zero and stay so; None where none are. scale [groups, out]. tried [groups, scales, out]. hessian [in, in];
    inverse, ahead [groups, size, size]: of its diagonal blocks, the latter as in `Factor`.
    """
    size = inverse.shape[1]
    for group in range(len(scale)):
        start = group * size
        part = slice(start, start + size)
        slope, old, scales = slopes[part], levels[part], tried[group]
        now = old * scale[group]
        left = (now + inverse[group] @ slope).unsqueeze(1).repeat(1, len(scales), 1)
        found, flat = torch.empty_like(left), left.flatten(1)
        columns, chosen, shares = left.unbind(0), found.unbind(0), ahead[group].unbind(0)
        for column in range(size):
            value, level = columns[column], chosen[column]
            torch.div(value if keep is None else value * keep[start + column], scales, out=level)
            snapped_(level, group, bounds, float8, table, between)
            error = torch.addcmul(value, level, scales, value=-1)
            flat.addr_(shares[column], error.flatten(), alpha=-1)
        moves = found * scales - now.unsqueeze(1)
        bent = (hessian[part, part] @ moves.flatten(1)).view_as(moves)
        gain, which = ((2 * slope.unsqueeze(1) - bent) * moves).sum(0).max(0)
        better, best = gain > 0, which.expand(size, 1, -1)
        old.copy_(torch.where(better, found.gather(1, best).squeeze(1), old))
        scale[group] = torch.where(better, scales.gather(0, which.unsqueeze(0)).squeeze(0), scale[group])
        slopes.addmm_(hessian[:, part], moves.gather(1, best).squeeze(1) * better, alpha=-1)
