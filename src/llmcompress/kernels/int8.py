"""Products in int8: inputs rounded token by token (or with one fixed scale), multiplied exactly, scaled at the end."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompress.kernels.compile_errors import TakesNotError
from llmcompress.kernels.int8_layout import TILE, Int8Weight, tiles_of
from llmcompress.kernels.launch import Kernel, Launch, Launcher
from llmcompress.kernels.tensor_checks import (
    MOST_BLOCKS,
    bfloat,
    ceil,
    check_channels,
    check_inputs,
    optional,
    rows_aligned,
    shared_limit,
    up,
)
from llmcompress.kernels.workspace import Workspace

_LEAST_TILES = 4  # of inputs, for each block that shares a tile of the output


@dataclass(frozen=True)
class Int8Tile:
    """Tokens by channels of a block, its warps, its stages. cost: of a product in it, beside the best."""

    tokens: int
    channels: int
    warps: tuple[int, int]
    stages: int
    cost: float = 1.0

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return (self.tokens + self.channels) * TILE * self.stages

    @property
    def threads(self) -> int:
        return self.warps[0] * self.warps[1] * 32

    def kernel(self, dtype: torch.dtype) -> Kernel:
        names = ("TILE_M", "TILE_N", "WARPS_M", "WARPS_N", "STAGES", "BFLOAT")
        values = (self.tokens, self.channels, *self.warps, self.stages, bfloat(dtype))
        return Kernel("int8.cu", "int8_matmul", tuple(zip(names, values, strict=True)))


_FEW = (Int8Tile(16, 128, (1, 4), 4), Int8Tile(32, 128, (1, 4), 4), Int8Tile(64, 128, (2, 2), 4))
_MANY = (Int8Tile(128, 256, (2, 4), 3), Int8Tile(128, 128, (2, 2), 3, 1.1), Int8Tile(64, 128, (2, 2), 4, 1.3))


@dataclass(frozen=True)
class Int8Inputs:
    """codes int8 [tokens, in rounded up to 128], zeros after `width`. scale [tokens] float32, NaN where an input is."""

    codes: Tensor
    scale: Tensor
    width: int
    dtype: torch.dtype


def quantise(launcher: Launcher, x: Tensor, *, scale: Tensor | None = None) -> Int8Inputs:
    """x [tokens, in] float16 or bfloat16 as codes, equal to those of `grids.inputs.InputGrid`.

    scale [1]: one for all; else each token has its own.
    """
    x = check_inputs(x, x.shape[-1])
    tokens, width = x.shape
    codes = torch.empty(tokens, up(width, TILE), dtype=torch.int8, device=x.device)
    scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    if tokens:
        launch = quantise_launch(tokens, width, x.dtype, fixed=scale is not None)
        sizes = width, x.stride(0), codes.shape[1], int(rows_aligned(x))
        launcher(launch, x, optional(scale, x, torch.float32), codes, scales, *sizes)
    return Int8Inputs(codes, scales, width, x.dtype)


def quantise_launch(tokens: int, width: int, dtype: torch.dtype, *, fixed: bool) -> Launch:
    """One block for each token."""
    defines = (("BFLOAT", bfloat(dtype)), ("FIXED", int(fixed)))
    threads = min(1024, up(ceil(up(width, TILE), 8), 32))
    return Launch(Kernel("quantise.cu", "quantise", defines), (tokens, 1, 1), (threads, 1, 1), 4 * 32)


def matmul(
    launcher: Launcher, x: Int8Inputs, weight: Int8Weight, workspace: Workspace, bias: Tensor | None = None
) -> Tensor:
    """y [tokens, out] of the type the inputs had: codes W^T, exact, times both scales, plus bias [out]."""
    if x.width != weight.width:
        raise TakesNotError(f"inputs of {x.width} channels do not fit a weight with {weight.width}")
    tokens, channels = x.codes.shape[0], weight.codes.shape[0]
    if bias is not None:
        check_channels(bias, channels, "bias")
    y = torch.empty(tokens, channels, dtype=x.dtype, device=x.codes.device)
    if not tokens or not channels:
        return y
    launch = matmul_launch(tokens, channels, weight.width, x.dtype, launcher)
    blocks, (columns, rows, splits) = launch.grid[0] * launch.grid[1], launch.grid
    sums = splits * columns * rows * dict(launch.kernel.defines)["TILE_M"] * dict(launch.kernel.defines)["TILE_N"]
    launcher(
        launch,
        *(x.codes, x.scale, weight.codes, weight.scale, optional(bias, y, torch.float32), y),
        *(workspace.partial(sums if splits > 1 else 0), workspace.counters(blocks)),
        *(tokens, channels, weight.codes.shape[1]),
    )
    return y


def matmul_launch(tokens: int, channels: int, width: int, dtype: torch.dtype, launcher: Launcher) -> Launch:
    """The tile that takes least time, and as many blocks to a tile of the output as keep the device busy."""
    tile = min(_tiles(tokens, launcher.architecture), key=lambda tile: _time(tile, tokens, channels, width, launcher))
    columns, rows = ceil(tokens, tile.tokens), ceil(channels, tile.channels)
    if rows > MOST_BLOCKS:
        raise TakesNotError(f"int8 products take up to {MOST_BLOCKS * tile.channels} output channels, not {channels}")
    grid = columns, rows, _splits(tile, tokens, channels, width, launcher)
    return Launch(tile.kernel(dtype), grid, (tile.threads, 1, 1), tile.shared)


def _tiles(tokens: int, architecture: str) -> list[Int8Tile]:
    few = [tile for tile in _FEW if tokens <= tile.tokens][:1]
    return [tile for tile in few or _MANY if tile.shared <= shared_limit(architecture)]


def _splits(tile: Int8Tile, tokens: int, channels: int, width: int, launcher: Launcher) -> int:
    blocks = ceil(tokens, tile.tokens) * ceil(channels, tile.channels)
    return max(1, min(launcher.multiprocessors // blocks, tiles_of(width) // _LEAST_TILES))


def _time(tile: Int8Tile, tokens: int, channels: int, width: int, launcher: Launcher) -> float:
    """The relative time of the busiest multiprocessor's products."""
    splits = _splits(tile, tokens, channels, width, launcher)
    blocks = ceil(tokens, tile.tokens) * ceil(channels, tile.channels) * splits
    return ceil(blocks, launcher.multiprocessors) * tile.tokens * tile.channels * tile.cost / splits


def variants(architecture: str) -> Iterator[Kernel]:
    """Every kernel that is ever launched on an architecture."""
    for dtype in (torch.float16, torch.bfloat16):
        for fixed in (False, True):
            yield quantise_launch(1, 1, dtype, fixed=fixed).kernel
        held = [tile for tile in (*_FEW, *_MANY) if tile.shared <= shared_limit(architecture)]
        yield from dict.fromkeys(tile.kernel(dtype) for tile in held)
