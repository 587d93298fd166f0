"""y = x W^T for 1 to 128 rows: from shapes to a launch of `csrc/matmul.cu`."""

import torch
from torch import Tensor

from llmcompress.kernels.errors import TakesNotError
from llmcompress.kernels.launch import Kernel, Launch, Launcher
from llmcompress.kernels.partition import Problem, partition
from llmcompress.kernels.shapes import bfloat, check_channels, check_inputs, optional, rows_aligned
from llmcompress.kernels.tiles import TiledWeight
from llmcompress.kernels.workspace import Workspace

MOST_ROWS = 128
_SCALES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


def weight_defines(weight: TiledWeight, dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """Macros of `csrc/weights.cuh`. Raises TakesNotError for activations of another type."""
    if dtype not in (torch.float16, torch.bfloat16):
        raise TakesNotError(f"the kernels take activations in float16 or bfloat16, not {dtype}".replace("torch.", ""))
    return (
        ("BFLOAT", bfloat(dtype)),
        ("BITS", weight.bits),
        ("GROUP", weight.group),
        ("ZERO", -1 if weight.zero is None else weight.zero),
        ("SCALE", _SCALES[weight.scales.dtype]),
    )


def problem(rows: int, weight: TiledWeight) -> Problem:
    """What a product with `rows` rows asks of a device. Raises TakesNotError if there are too many."""
    if not 1 <= rows <= MOST_ROWS:
        raise TakesNotError(f"the kernel takes 1 to {MOST_ROWS} rows, not {rows}")
    blocks = weight.codes.shape[0] * weight.codes.shape[1]
    return Problem(rows, weight.outputs, weight.inputs, weight.bytes // max(blocks, 1))


def matmul(
    launcher: Launcher, x: Tensor, weight: TiledWeight, workspace: Workspace, bias: Tensor | None = None
) -> Tensor:
    """y [tokens, out] of the type of x [tokens, in], float16 or bfloat16: x W^T plus bias [out], summed in float32.

    The same to the bit on all devices with as many multiprocessors. Raises TakesNotError beyond 128 tokens.
    """
    x = check_inputs(x, weight.inputs)
    if bias is not None:
        check_channels(bias, weight.outputs, "bias")
    y = torch.empty(x.shape[0], weight.outputs, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    plan = partition(problem(x.shape[0], weight), launcher.architecture, launcher.multiprocessors)
    x = _aligned(x if weight.order is None else x[:, weight.order])
    kernel = Kernel("matmul.cu", "matmul", (*weight_defines(weight, x.dtype), *plan.defines))
    launcher(
        Launch(kernel, plan.grid, (plan.threads, 1, 1), plan.shared),
        *(weight.codes, weight.scales, optional(weight.zeros, y, torch.uint8)),
        *(x, optional(bias, y, x.dtype), y),
        *(workspace.partial(plan.partial), workspace.counters(plan.counters)),
        *(*y.shape, weight.inputs, x.stride(0)),
    )
    return y


def _aligned(x: Tensor) -> Tensor:
    """x [tokens, in], or a copy of it whose rows begin on 16 bytes."""
    if rows_aligned(x):
        return x
    wide = x.new_empty(x.shape[0], -(-x.shape[1] // 8) * 8)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]
