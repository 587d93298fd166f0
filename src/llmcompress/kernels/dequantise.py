"""A tiled matrix to a dense one, by `csrc/dequantise.cu`: for products with more rows than the kernels take."""

import torch
from torch import Tensor

from llmcompress.kernels.launch import Kernel, Launch, Launcher
from llmcompress.kernels.matmul import weight_defines
from llmcompress.kernels.tiles import TiledWeight

_WARPS = 4


def dequantise(launcher: Launcher, weight: TiledWeight, dtype: torch.dtype) -> Tensor:
    """[out, in] in float16 or bfloat16, columns in the order of the tiles (`weight.order`).

    Each value is (code - zero point) * scale in float32, rounded once. Slabs of a large matrix: `weight.rows(...)`.
    """
    dense = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.codes.device)
    down, along = weight.codes.shape[:2]
    launcher(
        Launch(
            Kernel("dequantise.cu", "dequantise", weight_defines(weight, dtype)),
            (-(-along // _WARPS), down, 1),
            (32 * _WARPS, 1, 1),
        ),
        weight.codes,
        weight.scales,
        dense.new_empty(0) if weight.zeros is None else weight.zeros,
        dense,
        weight.outputs,
        weight.inputs,
    )
    return dense
