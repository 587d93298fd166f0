"""y = x W^T for 1 to 128 rows: from shapes to a launch of `csrc/matmul.cu`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompress.kernels.launch import Kernel, Launch, Launcher
from llmcompress.kernels.limits import KernelLimitError
from llmcompress.kernels.partition import Partition, Problem, partition
from llmcompress.kernels.tiles import TiledWeight

MOST_ROWS = 128
_SCALES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


@dataclass
class Workspace:
    """Memory for sums of blocks that share a tile. It grows with need, and launches of one stream share it."""

    partial: Tensor
    counters: Tensor

    @classmethod
    def on(cls, device: torch.device | str) -> "Workspace":
        empty = torch.empty(0, device=device)
        return cls(empty, torch.zeros(0, dtype=torch.int32, device=device))

    def reserve(self, plan: Partition) -> None:
        """Make it large enough for a launch; what is there already stays if it is."""
        if self.partial.numel() < plan.partial_floats:
            self.partial = torch.empty(plan.partial_floats, device=self.partial.device)
        if self.counters.numel() < plan.counters:
            self.counters = torch.zeros(plan.counters, dtype=torch.int32, device=self.counters.device)


def weight_defines(weight: TiledWeight, dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """Macros of `csrc/weights.cuh`. Raises KernelLimitError for activations of another type."""
    if dtype not in (torch.float16, torch.bfloat16):
        raise KernelLimitError(
            f"the kernels take activations in float16 or bfloat16, not {dtype}".replace("torch.", "")
        )
    return (
        ("BFLOAT", int(dtype == torch.bfloat16)),
        ("BITS", weight.bits),
        ("GROUP", weight.group),
        ("ZERO", -1 if weight.zero is None else weight.zero),
        ("SCALE", _SCALES[weight.scales.dtype]),
    )


def problem(rows: int, weight: TiledWeight) -> Problem:
    """What a product with `rows` rows asks of a device. Raises KernelLimitError if there are too many."""
    if not 1 <= rows <= MOST_ROWS:
        raise KernelLimitError(f"the kernel takes 1 to {MOST_ROWS} rows, not {rows}")
    blocks = weight.codes.shape[0] * weight.codes.shape[1]
    return Problem(rows, weight.outputs, weight.inputs, weight.bytes // max(blocks, 1))


def matmul(
    launcher: Launcher, x: Tensor, weight: TiledWeight, bias: Tensor | None = None, *, workspace: Workspace
) -> Tensor:
    """x [rows, in] float16 or bfloat16 times a matrix: [rows, out] in the type of x, summed in float32.

    bias [out] in the type of x. The sums are the same, to the bit, on devices with as many multiprocessors. Raises
    KernelLimitError beyond 128 rows.
    """
    rows = x.shape[0]
    plan = partition(problem(rows, weight), launcher.architecture, launcher.multiprocessors)
    workspace.reserve(plan)
    x = _aligned(x if weight.order is None else x[:, weight.order])
    y = torch.empty(rows, weight.outputs, dtype=x.dtype, device=x.device)
    none = x.new_empty(0)
    kernel = Kernel("matmul.cu", "matmul", (*weight_defines(weight, x.dtype), *plan.defines))
    launcher(
        Launch(kernel, plan.grid, (plan.threads, 1, 1), plan.shared),
        weight.codes,
        weight.scales,
        none if weight.zeros is None else weight.zeros,
        x,
        none if bias is None else bias,
        y,
        workspace.partial,
        workspace.counters,
        rows,
        weight.outputs,
        weight.inputs,
        x.stride(0) if rows > 1 else 0,
    )
    return y


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy of it whose rows begin on 16 bytes."""
    if x.stride(1) == 1 and x.data_ptr() % 16 == 0 and (x.shape[0] == 1 or x.stride(0) % 8 == 0):
        return x
    wide = x.new_empty(x.shape[0], -(-x.shape[1] // 8) * 8)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]
