"""Rounding to floats of few bits, also as TorchScript runs it."""

import torch
from torch import Tensor


def snapped_(values: Tensor, bits: int, least: float, most: float) -> Tensor:
    """Round float32 values in place to floats with `bits` of mantissa, ties to even ones.

    least, most: powers of two; below the first floats are evenly spaced, beyond the second as they are from it on.
    """
    octave = (values.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(least, most)  # the exponent alone
    pin = octave.mul_(1.5 * 2.0 ** (23 - bits))  # added and taken away again: leaves multiples of a power of two
    return values.add_(pin).sub_(pin)
