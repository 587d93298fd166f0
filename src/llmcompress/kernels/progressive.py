"""Products of int8 inputs and weights in progressive groups (W4A8)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompress.grids.progressive import PROGRESSIVE_GROUPS
from llmcompress.kernels import int8
from llmcompress.kernels.compile_errors import TakesNotError
from llmcompress.kernels.int8 import Int8Inputs
from llmcompress.kernels.int8_layout import TILE, Int8Weight
from llmcompress.kernels.launch import Kernel, Launch, Launcher
from llmcompress.kernels.progressive_layout import ProgressiveWeight
from llmcompress.kernels.tensor_checks import MOST_BLOCKS, bfloat, ceil, check_channels, optional, up
from llmcompress.kernels.workspace import Workspace

MOST_TOKENS = 128  # beyond, weights are expanded to int8 once
_WARPS = 8


@dataclass(frozen=True)
class ProgressiveTile:
    """8 * tokens tokens by 16 * channels * warps channels of a block, whose eight warps share channels and inputs."""

    tokens: int
    channels: int
    warps: int

    @property
    def sums(self) -> int:
        """Numbers of a block."""
        return 8 * self.tokens * 16 * self.channels * self.warps

    @property
    def inputs(self) -> int:
        """Inputs that its warps read at once."""
        return 256 // self.channels * (_WARPS // self.warps)

    def kernel(self, group_size: int, dtype: torch.dtype) -> Kernel:
        names = ("TOKENS", "CHANNELS", "WARPS_N", "WARPS_K", "GROUP", "BFLOAT")
        values = (self.tokens, self.channels, self.warps, _WARPS // self.warps, group_size, bfloat(dtype))
        return Kernel("progressive.cu", "progressive_matmul", tuple(zip(names, values, strict=True)))


_TILES = (ProgressiveTile(1, 1, 1), ProgressiveTile(2, 2, 1), ProgressiveTile(4, 2, 2), ProgressiveTile(8, 2, 4))


def matmul(
    launcher: Launcher, x: Int8Inputs, weight: ProgressiveWeight, workspace: Workspace, bias: Tensor | None = None
) -> Tensor:
    """y [tokens, out] of the type the inputs had: codes W^T, exact, times the scales of token and row, plus bias."""
    tokens, channels = x.codes.shape[0], weight.scale.shape[0]
    if x.width != weight.width:
        raise TakesNotError(f"inputs of {x.width} channels do not fit a weight with {weight.width}")
    if tokens > MOST_TOKENS:
        return int8.matmul(launcher, x, expand(launcher, weight), workspace, bias)
    if bias is not None:
        check_channels(bias, channels, "bias")
    y = torch.empty(tokens, channels, dtype=x.dtype, device=x.codes.device)
    if not tokens or not channels:
        return y
    tile = _tile(tokens)
    launch = matmul_launch(tokens, channels, weight.width, weight.group_size, x.dtype, launcher)
    blocks, splits = launch.grid[0] * launch.grid[1], launch.grid[2]
    launcher(
        launch,
        *(x.codes, x.scale, weight.words, weight.groups, weight.scale, optional(bias, y, torch.float32), y),
        *(workspace.partial(blocks * splits * tile.sums if splits > 1 else 0), workspace.counters(blocks)),
        *(tokens, channels, x.codes.shape[1]),
    )
    return y


def matmul_launch(
    tokens: int, channels: int, width: int, group_size: int, dtype: torch.dtype, launcher: Launcher
) -> Launch:
    """Blocks share a tile of the output where there are fewer tiles than multiprocessors."""
    tile = _tile(tokens)
    grid = ceil(tokens, 8 * tile.tokens), ceil(channels, 16 * tile.channels * tile.warps)
    if grid[1] > MOST_BLOCKS:
        raise TakesNotError(f"progressive products take up to {MOST_BLOCKS} blocks of channels, not {grid[1]}")
    splits = max(1, min(launcher.multiprocessors // (grid[0] * grid[1]), up(width, TILE) // tile.inputs))
    shared = 4 * tile.sums * (_WARPS // tile.warps - 1)
    return Launch(tile.kernel(group_size, dtype), (*grid, splits), (_WARPS * 32, 1, 1), shared)


def expand(launcher: Launcher, weight: ProgressiveWeight) -> Int8Weight:
    """The same matrix in int8: whole numbers of a row, exact."""
    channels, width = weight.scale.shape[0], up(weight.width, TILE)
    codes = torch.empty(channels, width, dtype=torch.int8, device=weight.words.device)
    if channels:
        launcher(expand_launch(channels, width, weight.group_size), weight.words, weight.groups, codes, channels, width)
    return Int8Weight(codes, weight.scale, weight.width)


def expand_launch(channels: int, width: int, group_size: int) -> Launch:
    """A warp for each tile of 16 channels by 64 inputs."""
    rows = ceil(channels, 16)
    if rows > MOST_BLOCKS:
        raise TakesNotError(f"progressive weights are expanded up to {MOST_BLOCKS * 16} channels, not {channels}")
    kernel = Kernel("expand.cu", "progressive_expand", (("GROUP", group_size),))
    return Launch(kernel, (ceil(width // 64, _WARPS), rows, 1), (_WARPS * 32, 1, 1))


def _tile(tokens: int) -> ProgressiveTile:
    return next((tile for tile in _TILES if tokens <= 8 * tile.tokens), _TILES[-1])


def variants(architecture: str) -> Iterator[Kernel]:
    """Every kernel that is ever launched on an architecture, beside those of `int8`."""
    for group_size in PROGRESSIVE_GROUPS:
        yield expand_launch(1, 64, group_size).kernel
        for dtype in (torch.float16, torch.bfloat16):
            yield from (tile.kernel(group_size, dtype) for tile in _TILES)
