"""y = x W^T for 1 to 128 rows: from shapes to a launch of `csrc/matmul.cu`."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from llmcompress.kernels import partition
from llmcompress.kernels.compile_errors import TakesNotError
from llmcompress.kernels.launch import Kernel, Launch, Launcher
from llmcompress.kernels.partition import Partition, Problem
from llmcompress.kernels.tensor_checks import MOST, check_channels, check_inputs, optional, rows_aligned, up
from llmcompress.kernels.tiles import INPUTS, OUTPUTS, USUAL, TiledWeight
from llmcompress.kernels.workspace import Workspace

MOST_ROWS = 128


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
    plan = plan_of(x.shape[0], weight, launcher)
    x = _aligned(x if weight.order is None else x[:, weight.order])
    launcher(
        _launch(plan, x.dtype),
        *(weight.codes, weight.scales, optional(weight.zeros, y, torch.uint8)),
        *(x, optional(bias, y, x.dtype), y),
        *(workspace.partial(plan.partial), workspace.counters(plan.counters)),
        *(*y.shape, weight.inputs, x.stride(0)),
    )
    return y


def plan_of(rows: int, weight: TiledWeight, launcher: Launcher) -> Partition:
    """How a product with `rows` rows runs. Raises TakesNotError for too many rows and for sizes beyond 2^31."""
    if not 1 <= rows <= MOST_ROWS:
        raise TakesNotError(f"the kernel takes 1 to {MOST_ROWS} tokens, not {rows}")
    if max(weight.outputs + OUTPUTS * 8, weight.inputs + INPUTS * 8) > MOST:
        raise TakesNotError(f"kernels take matrices of up to {MOST} rows and columns")
    problem = Problem(rows, weight.outputs, weight.inputs, weight.spec)
    return partition.best(problem, launcher.architecture, launcher.multiprocessors)


@cache
def _launch(plan: Partition, dtype: torch.dtype) -> Launch:
    return Launch(kernel_of(plan, dtype), plan.grid, (plan.threads, 1, 1), plan.shared, overlaps=True)


def kernel_of(plan: Partition, dtype: torch.dtype) -> Kernel:
    """The kernel of a plan for inputs of a type."""
    return Kernel("matmul.cu", "matmul", (*plan.problem.spec.defines(dtype), *plan.defines))


def variants(architecture: str) -> Iterator[Kernel]:
    """All kernels for the usual tiles on an architecture; those for other groups and scales differ in little."""
    for spec in USUAL:
        for dtype in (torch.float16, torch.bfloat16):
            for plan in partition.variants(Problem(1, 1, 1, spec), architecture):
                yield kernel_of(plan, dtype)


def _aligned(x: Tensor) -> Tensor:
    """x [tokens, in], or a copy of it whose rows begin on 16 bytes."""
    if rows_aligned(x):
        return x
    wide = x.new_empty(x.shape[0], up(x.shape[1], 8))
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]
