"""The loops of GPTQ and of descent as one kernel for each block of columns, and that of scales as one for all."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompress.grids.snapping import rescale_
from llmcompress.kernels.compile_errors import KernelsError
from llmcompress.kernels.launch import Kernel, Launch, Launcher
from llmcompress.solve.column_sweep import Levels

COLUMNS = 128  # of a block
_ROWS = 8  # of a thread block, one for each warp
_SHARED = 4 * 32 * (COLUMNS + 96 + 64 + 32)  # bytes of what columns do to those after them, from the diagonal
_ROUND, _MOVE = Kernel("sweep.cu", "round_block"), Kernel("sweep.cu", "move_block")
_RESCALE = Kernel("rescale.cu", "rescale")
_LANES = 32  # columns of a group at most


@dataclass(frozen=True)
class KernelSweeper:
    """A `solve.sweep.Sweeper` whose tensors lie on `device`, where `launcher` runs kernels."""

    launcher: Launcher
    device: torch.device
    columns: int = COLUMNS

    def takes(self, columns: Tensor, steps: Levels) -> bool:
        here = columns.device.type == self.device.type and columns.dtype == torch.float32
        return here and not steps.float8

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
        tensors = (columns, levels, errors, _or_none(keep, columns), ahead)
        self._launch(_ROUND, tensors, steps, (_or_none(steps.offset, columns),), start)

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
        self._launch(_MOVE, tensors, steps, (), start)

    def rescale(
        self,
        slopes: Tensor,
        levels: Tensor,
        keep: Tensor | None,
        scale: Tensor,
        tried: Tensor,
        hessian: Tensor,
        inverse: Tensor,
        ahead: Tensor,
        bounds: tuple[Tensor, Tensor] | None,
        float8: bool,
        table: Tensor | None,
        between: Tensor | None,
    ) -> None:
        (size, rows), width, here = slopes.shape, inverse.shape[1], slopes.device.type == self.device.type
        if table is None or width > _LANES or not here:
            rescale_(slopes, levels, keep, scale, tried, hessian, inverse, ahead, bounds, float8, table, between)
            return
        tensors = [slopes, levels, _or_none(keep, slopes), scale, tried, hessian, inverse, ahead, table]
        places = _places(len(table))
        numbers = (rows, size, width, tried.shape[1], len(table), places)
        self._run(_RESCALE, 4 * 2 * places, tensors, numbers)

    def _launch(
        self, kernel: Kernel, tensors: tuple[Tensor, ...], steps: Levels, offset: tuple[Tensor, ...], start: int
    ) -> None:
        """tensors: the kernel's first, of them columns [in, out] or slopes, levels, and errors [some, out] or moves."""
        columns, _, errors, *_ = tensors
        low, high = steps.bounds or (None, None)
        bounds, table = (_or_none(low, columns), _or_none(high, columns)), _or_none(steps.table, columns)
        tensors = (*tensors, steps.scale, steps.inverse, *bounds, *offset, steps.index, table)
        size, rows = columns.shape
        count, own = (0, 0) if steps.table is None else (table.shape[-1], table.dim() - 1)
        places = _places(count)
        shared = _SHARED + 4 * 2 * places * (_ROWS if own else 1)
        self._run(kernel, shared, tensors, (rows, size, start, errors.shape[0], count, places, own))

    def _run(self, kernel: Kernel, shared: int, tensors: Sequence[Tensor], numbers: tuple[int, ...]) -> None:
        """numbers: the first is that of rows, each of which is a warp's."""
        for tensor in tensors:
            assert tensor.is_contiguous()  # kernels know no strides
        launch = Launch(kernel, (-(-numbers[0] // _ROWS), 1, 1), (32 * _ROWS, 1, 1), shared)
        self.launcher(launch, *tensors, *numbers)


def variants(architecture: str) -> Iterator[Kernel]:
    """Every kernel there is."""
    yield from (_ROUND, _MOVE, _RESCALE)


def gpu_sweeper(device: torch.device, say: Callable[[str], None]) -> KernelSweeper | None:
    """A sweeper for a GPU whose kernels are built and run; None, with a line to `say` why, where that cannot be."""
    from llmcompress.kernels.cuda import open_gpu

    try:
        found = KernelSweeper(open_gpu(device, say), device)
        one = torch.ones(1, 1, device=device)
        steps = Levels(one, one, None, torch.zeros(1, dtype=torch.int32, device=device), (-one, one))
        found.round_block(one, one.clone(), None, one, steps, 0, one.clone())
        found.move_block(one, one.clone(), None, one, one, steps, 0, one.clone())
        square = one[None]
        found.rescale(
            one.clone(), one.clone(), None, one.clone(), square, one, square, square, None, False, one[0], one
        )
    except KernelsError as error:
        say(f"torch decides column by column, which is slower: {error.message}")
        return None
    return found


def _places(count: int) -> int:
    """The power of two that holds so many levels; 0 for none."""
    return 1 << (count - 1).bit_length() if count else 0


def _or_none(tensor: Tensor | None, like: Tensor) -> Tensor:
    """A tensor, or an empty one, whose pointer is null."""
    return like.new_empty(0) if tensor is None else tensor
