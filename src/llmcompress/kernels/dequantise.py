"""Decoding a tiled matrix to a dense one by `csrc/dequantise.cu`, for products with more rows than kernels take."""

from collections.abc import Iterator

import torch
from torch import Tensor

from llmcompress.kernels.compile_errors import TakesNotError
from llmcompress.kernels.launch import Kernel, Launch, Launcher
from llmcompress.kernels.tensor_checks import MOST_BLOCKS, ceil, optional
from llmcompress.kernels.tiles import USUAL, TiledWeight, TileSpec

_WARPS = 4


def dequantise(launcher: Launcher, weight: TiledWeight, dtype: torch.dtype) -> Tensor:
    """W [out, in] in float16 or bfloat16, columns in the order of the tiles (`weight.order`).

    Each value is (code - zero point) * scale in float32, rounded once. Slabs of a large matrix: `weight.rows(...)`.
    """
    dense = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.codes.device)
    down, along = weight.codes.shape[:2]
    if down > MOST_BLOCKS:
        raise TakesNotError(
            f"the kernel decodes up to {32 * MOST_BLOCKS} output channels at once, not {weight.outputs}"
        )
    if dense.numel():
        launcher(
            Launch(kernel_of(weight.spec, dtype), (ceil(along, _WARPS), down, 1), (32 * _WARPS, 1, 1)),
            *(weight.codes, weight.scales, optional(weight.zeros, dense, torch.uint8)),
            *(dense, weight.outputs, weight.inputs),
        )
    return dense


def kernel_of(spec: TileSpec, dtype: torch.dtype) -> Kernel:
    """The kernel for tiles to a dense matrix of a type."""
    return Kernel("dequantise.cu", "dequantise", spec.defines(dtype))


def variants(architecture: str) -> Iterator[Kernel]:
    """The kernels for the usual tiles, the same on all architectures."""
    for spec in USUAL:
        for dtype in (torch.float16, torch.bfloat16):
            yield kernel_of(spec, dtype)
