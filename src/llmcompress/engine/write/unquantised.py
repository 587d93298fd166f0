"""Tensors of the output that are not codes: as a pruner left them, or as in the source."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from llmcompress.store.checkpoint import DTYPES, Checkpoint
from llmcompress.store.staging import Staging

if TYPE_CHECKING:
    from llmcompress.engine.plan.plan import Plan


def uncoded(plan: "Plan", checkpoint: Checkpoint, staged: Staging) -> Callable[[str], Tensor]:
    """A reader of finite tensors by on-disk name, each in its shape and type of the source."""
    pruned = {matrix.entry.source.name: matrix for layer in plan.layers for matrix in layer if not matrix.entry.grid}

    def read(name: str) -> Tensor:
        matrix = pruned.get(name)
        if matrix is None:
            return checkpoint.read_finite(name)
        values = staged.read_coded(matrix.layer, matrix.module).codes
        values = values.T.contiguous() if matrix.conv1d else values
        return values.to(DTYPES[matrix.entry.source.dtype])

    return read
