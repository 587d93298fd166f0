"""The search of scales and zero points of whole numbers, as TorchScript runs it.

Blocks are [rows, groups, group] float32; scales, zero points and losses are [rows, groups]. What an error costs is said
by `weigh`: [1, groups, group], by channel; or, `by_output`, [groups, group, group], diagonal blocks of a Gram matrix.
"""

import torch
from torch import Tensor

from llmcompress.scripted import scripted


def stored(scale: Tensor, bfloat16: bool) -> Tensor:
    """Scales rounded to float16, and to bfloat16 before if they must be of both; sign kept, none smaller than 2^-24."""
    if bfloat16:
        scale = scale.to(torch.bfloat16).to(torch.float32)
    scale = scale.clamp(-65504.0, 65504.0).to(torch.float16).to(torch.float32)
    smallest = 2.0**-24
    return torch.where(scale.abs() < smallest, torch.full_like(scale, smallest), scale)


def squared(delta: Tensor, weigh: Tensor, by_output: bool) -> Tensor:
    """What a difference [rows, groups, group] costs, [rows, groups]; it may be written over."""
    if by_output:
        return (_outputs(delta, weigh) * delta).sum(-1)
    return delta.square_().mul_(weigh).sum(-1)


def products(levels: Tensor, block: Tensor, weigh: Tensor, by_output: bool) -> tuple[Tensor, Tensor]:
    """Inner products [rows, groups] of levels with a block, and with themselves."""
    weighted = _outputs(levels, weigh) if by_output else levels * weigh
    return (weighted * block).sum(-1), (weighted * levels).sum(-1)


@scripted
def searched(
    block: Tensor,
    weigh: Tensor,
    by_output: bool,
    symmetric: bool,
    bfloat16: bool,
    top: int,
    shares: list[float],
    step: float,
) -> tuple[Tensor, Tensor]:
    """Scales and zero points: those that cover every weight, or the best of them and of `shares` of their range.

    top: the largest code. Tried next, each if it is better: shares that are `step` more and less than the best one;
    where zero points are free, those beside its own; twice, the least-squares scale for the codes it gives.
    """
    low, high = block.amin(-1), block.amax(-1)
    middle = (top + 1) // 2
    if symmetric:
        largest = torch.maximum(-low, high)
        sign = torch.where(high > -low, -1.0, 1.0)  # the extreme entry lands on the code that has no counterpart
        full = sign * largest / middle
        scale, zero = stored(largest * (2 / top), bfloat16), torch.full_like(largest, float(middle))
    else:
        low, high = low.clamp_max(0), high.clamp_min(0)  # the range contains zero
        full = (high - low) / top
        scale = stored(full, bfloat16)
        zero = (-low / scale).round().clamp(0, top)
    if len(shares) == 0:
        return scale, zero
    share = torch.ones_like(scale)  # of the best
    work = torch.empty_like(block)  # of every candidate in turn: memory that is not touched anew
    loss = _loss(block, weigh, by_output, scale, zero, symmetric, top, work)
    near = torch.ones_like(scale)
    ranges, zeros = len(shares) + 2, 0 if symmetric else 2
    for trial in range(ranges + zeros + 2):
        new, at, tried = scale, zero, share
        if trial < ranges:
            if trial < len(shares):
                tried = torch.full_like(share, shares[trial])
            elif trial == len(shares):
                near = share
                tried = near + step
            else:
                tried = near - step
            new = stored(full * tried, bfloat16)
            if not symmetric:
                at = (-low * tried / new).round().clamp(0, top)
        elif trial < ranges + zeros:
            at = (zero + (2 * (trial - ranges) - 1)).clamp(0, top)
        else:
            levels = _levels(block, scale, zero, symmetric, top, work)
            linear, square = products(levels, block, weigh, by_output)
            new = stored(torch.where(square > 0, linear / square.clamp_min(1e-30), scale), bfloat16)
        lost = _loss(block, weigh, by_output, new, at, symmetric, top, work)
        better = lost < loss
        loss = torch.where(better, lost, loss)
        scale = torch.where(better, new, scale)
        zero = torch.where(better, at, zero)
        share = torch.where(better, tried, share)
    return scale, zero


def _loss(
    block: Tensor, weigh: Tensor, by_output: bool, scale: Tensor, zero: Tensor, symmetric: bool, top: int, work: Tensor
) -> Tensor:
    """What rounding with given scales costs."""
    values = _levels(block, scale, zero, symmetric, top, work).mul_(scale.unsqueeze(-1))
    return squared(values.sub_(block), weigh, by_output)


def _levels(block: Tensor, scale: Tensor, zero: Tensor, symmetric: bool, top: int, work: Tensor) -> Tensor:
    """Codes of a block less their zero points, in the memory of `work`."""
    torch.div(block, scale.unsqueeze(-1), out=work)
    if symmetric:
        middle = (top + 1) // 2
        return work.round_().clamp_(-middle, top - middle)
    return work.add_(zero.unsqueeze(-1)).round_().clamp_(0, top).sub_(zero.unsqueeze(-1))


def _outputs(rows: Tensor, blocks: Tensor) -> Tensor:
    """Rows [rows, groups, group], each times the block [groups, group, group] of its group."""
    return torch.bmm(rows.transpose(0, 1), blocks).transpose(0, 1)
