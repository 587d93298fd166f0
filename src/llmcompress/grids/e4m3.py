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
MANTISSA = 3, 2.0**-6, 256.0  # its bits, the least value with all of them, and the last power of two


def rounded_(values: Tensor) -> Tensor:
    """Round float32 values of any shape to the nearest E4M3 floats, ties to even, in place; zero is never negative."""
    from llmcompress.grids.float_rounding import snapped_

    return snapped_(values, *MANTISSA).clamp_(-LARGEST, LARGEST)


class E4m3Grid(Grid):
    """A grid whose codes are floats of 8 bits, in units of the scale of their group."""

    mantissa: ClassVar[tuple[int, float, float] | None] = MANTISSA

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
