"""The column loops of GPTQ and of descent as one kernel for each block of columns."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompress.kernels.compile_errors import KernelsError
from llmcompress.kernels.launch import Kernel, Launch, Launcher
from llmcompress.solve.column_sweep import Levels

COLUMNS = 128  # of a block
_ROWS = 8  # of a thread block, one for each warp
_SHARED = 4 * 32 * (COLUMNS + 96 + 64 + 32)  # what a block's columns do to those after them, from the diagonal on
_ROUND, _MOVE = Kernel("sweep.cu", "round_block"), Kernel("sweep.cu", "move_block")


@dataclass(frozen=True)
class KernelSweeper:
    """A `solve.sweep.Sweeper` whose tensors lie on `device`, where `launcher` runs kernels."""

    launcher: Launcher
    device: torch.device
    columns: int = COLUMNS

    def takes(self, columns: Tensor, steps: Levels) -> bool:
        here = columns.device.type == self.device.type and columns.dtype == torch.float32
        return here and steps.whole is not None

    def round_block(
        self,
        columns: Tensor,
        levels: Tensor,
        keep: Tensor | None,
        ahead: Tensor,
        steps: Levels,
        start: int,
        errors: Tensor,
    ) -> None:
        offset = _or_none(steps.offset, columns)
        tensors = (columns, levels, errors, _or_none(keep, columns), ahead)
        assert steps.whole is not None
        tables = (steps.scale, steps.inverse, *steps.whole, offset, steps.index)
        self._launch(_ROUND, (*tensors, *tables), columns, start, errors)

    def move_block(
        self,
        slopes: Tensor,
        levels: Tensor,
        keep: Tensor | None,
        ahead: Tensor,
        curve: Tensor,
        steps: Levels,
        start: int,
        moves: Tensor,
    ) -> None:
        tensors = (slopes, levels, moves, _or_none(keep, slopes), ahead, curve)
        assert steps.whole is not None
        tables = (steps.scale, steps.inverse, *steps.whole, steps.index)
        self._launch(_MOVE, (*tensors, *tables), slopes, start, moves)

    def _launch(self, kernel: Kernel, tensors: tuple[Tensor, ...], columns: Tensor, start: int, errors: Tensor) -> None:
        for tensor in tensors:
            assert tensor.is_contiguous()  # kernels know no strides
        size, rows = columns.shape
        launch = Launch(kernel, (-(-rows // _ROWS), 1, 1), (32 * _ROWS, 1, 1), _SHARED)
        self.launcher(launch, *tensors, rows, size, start, errors.shape[0])


def variants(architecture: str) -> Iterator[Kernel]:
    """Every kernel there is."""
    yield from (_ROUND, _MOVE)


def gpu_sweeper(device: torch.device, say: Callable[[str], None]) -> KernelSweeper | None:
    """A sweeper for a GPU whose kernels are built and run; None, with a line to `say` why, where that cannot be."""
    from llmcompress.kernels.cuda import open_gpu

    try:
        found = KernelSweeper(open_gpu(device, say), device)
        one = torch.ones(1, 1, device=device)
        steps = Levels(one, one, None, torch.zeros(1, dtype=torch.int32, device=device), (-one, one))
        found.round_block(one, one.clone(), None, one, steps, 0, one.clone())
        found.move_block(one, one.clone(), None, one, one, steps, 0, one.clone())
    except KernelsError as error:
        say(f"torch decides column by column, which is slower: {error.message}")
        return None
    return found


def _or_none(tensor: Tensor | None, like: Tensor) -> Tensor:
    """A tensor, or an empty one, whose pointer is null."""
    return like.new_empty(0) if tensor is None else tensor
