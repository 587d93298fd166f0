"""Floats of 8 bits (E4M3, torch.float8_e4m3fn) as levels: what the grids that have them in common.

There are 253 values: 448 at most, three bits of mantissa down to 2^-6, multiples of 2^-9 below. Codes are the bits of
the float; minus zero and the two that are no numbers are never chosen. Source: Micikevicius et al., 2022,
arXiv:2209.05433, table 1.
"""

from __future__ import annotations

from typing import ClassVar

from llmcompress.grids.coded import Grid
from llmcompress.lazy import Tensor, torch

LARGEST = 448.0
_NORMAL = 2.0**-6  # least value with all three bits of mantissa
_EXPONENT = 0x7F800000  # of a float32
_PIN = 1.5 * 2.0**23  # times a power of two, added and taken away again: leaves multiples of that power


def rounded_(values: Tensor) -> Tensor:
    """Round float32 values of any shape to the nearest E4M3 floats, ties to even, in place; zero is never negative."""
    return snapped_(values, 3, _NORMAL, 256.0).clamp_(-LARGEST, LARGEST)


def snapped_(values: Tensor, bits: int, least: float, most: float) -> Tensor:
    """Round float32 values in place to floats with `bits` of mantissa, ties to even ones.

    least, most: powers of two; below the first floats are evenly spaced, beyond the second as they are from it on.
    """
    octave = (values.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(least, most)
    pin = octave.mul_(_PIN / 2**bits)
    return values.add_(pin).sub_(pin)


class E4m3Grid(Grid):
    """A grid whose codes are floats of 8 bits, in units of the scale of their group."""

    float8: ClassVar[bool] = True

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        most = torch.full_like(self.scale, LARGEST)
        return -most, most

    def levels(self, codes: Tensor) -> Tensor:
        return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)

    def codes(self, levels: Tensor) -> Tensor:
        nearest = rounded_(levels.to(torch.float32, copy=True))
        return nearest.to(torch.float8_e4m3fn).view(torch.uint8)

    def numbers(self, codes: Tensor) -> bool:
        return not bool((codes & 0x7F == 0x7F).any())
