"""Weights in int8 as `csrc/int8.cu` reads them: rows of a multiple of 128 inputs, zeros after the last."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded
from llmcompress.kernels.compile_errors import TakesNotError
from llmcompress.kernels.tensor_checks import ceil, padded

TILE = 128  # inputs
MOST_INPUTS = (1 << 31) // (128 * 128) - 1  # int32 holds the sum of this many products of codes


@dataclass(frozen=True)
class Int8Weight:
    """codes int8 [out, width rounded up to 128]. scale [out] float32."""

    codes: Tensor
    scale: Tensor
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.codes.nbytes + self.scale.nbytes


def int8_weight(codes: Tensor, scale: Tensor) -> Int8Weight:
    """Codes int8 [out, in] and scales [out] for the kernel; TakesNotError where int32 cannot hold the sums."""
    width = codes.shape[1]
    if not 0 < width <= MOST_INPUTS:
        raise TakesNotError(f"int8 products take 1 to {MOST_INPUTS} inputs, whose sums fit int32, not {width}")
    return Int8Weight(padded(codes, 1, TILE), scale.to(torch.float32).contiguous(), width)


def int8_of(coded: Coded) -> Int8Weight:
    """A matrix on a symmetric grid of 8 bits with one scale per row; TakesNotError for any other."""
    grid = coded.grid
    width = coded.codes.shape[1]
    rows = grid.spec.affine and grid.spec.bits == 8 and grid.centred
    if not rows or grid.spec.width(width) != width:
        raise TakesNotError(
            f"int8 products take symmetric codes of 8 bits with one scale per row, not {grid.spec.name}"
        )
    return int8_weight((coded.codes.to(torch.int16) - 128).to(torch.int8), grid.scale[:, 0])


def tiles_of(width: int) -> int:
    """Tiles of inputs in a row."""
    return ceil(width, TILE)
