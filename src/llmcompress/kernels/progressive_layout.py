"""Weights in progressive groups as `csrc/progressive.cuh` reads them."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded
from llmcompress.grids.progressive import GRID, ProgressiveGrid
from llmcompress.kernels.compile_errors import TakesNotError
from llmcompress.kernels.int8_layout import MOST_INPUTS, TILE
from llmcompress.kernels.tensor_checks import padded, up
from llmcompress.packing.lanes import pack_lanes


@dataclass(frozen=True)
class ProgressiveWeight:
    """words int32 [out/16, in/64, 8, 4, 4]: of channels g, g + 8 and 16 inputs each, what 32 lanes read at once.

    groups uint8 [out/16, in/group, 8, 4]: s1, s1 * zero of channel g, then of g + 8. scale [out] float32: s0. Both are
    padded with zeros to 16 channels and 128 inputs.
    """

    words: Tensor
    groups: Tensor
    scale: Tensor
    width: int
    group_size: int

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.words.nbytes + self.groups.nbytes + self.scale.nbytes


def progressive_of(coded: Coded) -> ProgressiveWeight:
    """A matrix on a progressive grid with groups in natural order; TakesNotError for any other."""
    if coded.grid.spec.type != GRID.name:
        raise TakesNotError(f"progressive products take progressive groups, not {coded.grid.spec.name}")
    grid = cast("ProgressiveGrid", coded.grid)
    size, width = grid.spec.group_size, coded.codes.shape[1]
    if not torch.equal(grid.group_index, torch.arange(width, device=grid.group_index.device) // size):
        raise TakesNotError("progressive products take groups in natural order")
    if width > MOST_INPUTS:
        raise TakesNotError(f"int8 products take 1 to {MOST_INPUTS} inputs, whose sums fit int32, not {width}")
    scale = grid.row_scale[:, 0].contiguous()
    return ProgressiveWeight(_words(coded.codes), _groups(grid, up(width, TILE) // size), scale, width, size)


def _words(codes: Tensor) -> Tensor:
    """Words of eight codes, where their lanes find them: channel 16a + 8h + g, inputs 64b + 16t + 8s and on."""
    words = pack_lanes(padded(codes, 16, TILE))
    tiles = words.view(words.shape[0] // 16, 2, 8, words.shape[1] // 8, 4, 2)
    return tiles.permute(0, 3, 2, 4, 5, 1).reshape(tiles.shape[0], tiles.shape[3], 8, 4, 4).contiguous()


def _groups(grid: ProgressiveGrid, groups: int) -> Tensor:
    pairs = torch.stack([grid.multiple, grid.multiple * grid.zero], dim=-1).to(torch.uint8)
    rows = padded(pairs.flatten(1), 16, 2 * groups)
    return rows.view(-1, 2, 8, groups, 2).permute(0, 3, 2, 1, 4).reshape(-1, groups, 8, 4).contiguous()
