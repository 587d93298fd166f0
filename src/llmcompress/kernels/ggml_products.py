"""Products of 16-bit inputs and weights in blocks of GGML's types, and the values of such weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

from llmcompress.grids.blocks import BLOCK_TYPES, BlockSpec
from llmcompress.kernels.compile_errors import TakesNotError
from llmcompress.kernels.ggml_layout import INPUTS, ROWS, TYPES, BlockWeight
from llmcompress.kernels.launch import Kernel, Launch, Launcher
from llmcompress.kernels.tensor_checks import (
    MOST_BLOCKS,
    RESERVED,
    bfloat,
    ceil,
    check_channels,
    check_inputs,
    optional,
    rows_aligned,
    shared_limit,
)

MOST_TOKENS = 32  # beyond, values times inputs by a library are faster
_WARPS = 8
_TOKENS = (1, 2)  # times 8: of a block


def matmul(launcher: Launcher, x: Tensor, weight: BlockWeight, bias: Tensor | None = None) -> Tensor:
    """y [tokens, out] of the type of x: x [tokens, in] W^T, summed in float32, plus bias [out].

    TakesNotError for more than 32 tokens: `values` then, and a product of torch.
    """
    channels, width = weight.shape
    x = check_inputs(x, width)
    if bias is not None:
        check_channels(bias, channels, "bias")
    y = torch.empty(x.shape[0], channels, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    launch = matmul_launch(x.shape[0], channels, weight.spec, x.dtype, launcher)
    x = x if rows_aligned(x) else x.clone(memory_format=torch.contiguous_format)
    sizes = x.shape[0], channels, width, x.stride(0)
    launcher(launch, x, weight.records, optional(bias, y, torch.float32), y, *sizes)
    return y


def matmul_launch(tokens: int, channels: int, spec: BlockSpec, dtype: torch.dtype, launcher: Launcher) -> Launch:
    """Blocks that take equally many tiles of 16 channels, all at once on the device; their warps share the inputs."""
    if tokens > MOST_TOKENS:
        raise TakesNotError(f"products with blocks of {spec.name} take up to {MOST_TOKENS} tokens, not {tokens}")
    count = next((count for count in _TOKENS if tokens <= 8 * count), _TOKENS[-1])
    columns, tiles = ceil(tokens, 8 * count), _tiles(channels)
    stages, at_once = _residence(spec, count, launcher.architecture)
    at_once = max(1, launcher.multiprocessors * at_once // columns)
    grid = columns, ceil(tiles, ceil(tiles, at_once)), 1
    kernel = _kernel(spec, dtype, count, launcher.architecture)
    return Launch(kernel, grid, (_WARPS * 32, 1, 1), _shared(spec, count, stages), overlaps=True)


def _shared(spec: BlockSpec, count: int, stages: int) -> int:
    """Bytes of a block: records of all warps, then their sums."""
    record = ROWS * INPUTS // spec.block_size * spec.block_bytes
    return _WARPS * (stages * record + 4 * 8 * count * (ROWS + 1))


def _residence(spec: BlockSpec, count: int, architecture: str) -> tuple[int, int]:
    """Records that a warp has at once, and blocks that a multiprocessor has: two where there are registers for them."""
    limit = shared_limit(architecture) + RESERVED
    for blocks in (2, 1) if count == 1 else (1,):
        for stages in (4, 3, 2):
            if (_shared(spec, count, stages) + RESERVED) * blocks <= limit:
                return stages, blocks
    raise TakesNotError(f"{architecture} has no shared memory for blocks of {spec.name}")


def values(launcher: Launcher, weight: BlockWeight, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in float32, or rounded from that once to float16 or bfloat16."""
    channels, width = weight.shape
    out = torch.empty(channels, width, dtype=dtype, device=weight.records.device)
    if out.numel():
        launcher(values_launch(channels, width, weight.spec, dtype), weight.records, out, channels, width)
    return out


def values_launch(channels: int, width: int, spec: BlockSpec, dtype: torch.dtype) -> Launch:
    """A warp for each record."""
    wide = dtype == torch.float32
    defines = (("BITS", spec.bits), ("BFLOAT", 0 if wide else bfloat(dtype)), ("WIDE", int(wide)))
    grid = ceil(ceil(width, INPUTS), _WARPS), _tiles(channels), 1
    return Launch(Kernel("ggml_values.cu", "ggml_values", defines), grid, (_WARPS * 32, 1, 1))


def _tiles(channels: int) -> int:
    if channels > MOST_BLOCKS * ROWS:
        raise TakesNotError(f"kernels take blocks of GGML of up to {MOST_BLOCKS * ROWS} channels, not {channels}")
    return ceil(channels, ROWS)


def _kernel(spec: BlockSpec, dtype: torch.dtype, count: int, architecture: str) -> Kernel:
    names = ("BITS", "BFLOAT", "TOKENS", "WARPS", "STAGES")
    values = (spec.bits, bfloat(dtype), count, _WARPS, _residence(spec, count, architecture)[0])
    return Kernel("ggml.cu", "ggml_matmul", tuple(zip(names, values, strict=True)))


def variants(architecture: str) -> Iterator[Kernel]:
    """Every kernel that is ever launched on an architecture."""
    for spec in map(BLOCK_TYPES.__getitem__, TYPES):
        for dtype in (torch.float16, torch.bfloat16):
            yield from (_kernel(spec, dtype, count, architecture) for count in _TOKENS)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            yield values_launch(1, 1, spec, dtype).kernel
