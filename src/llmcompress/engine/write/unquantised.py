"""Tensors of the output that are not codes: the values that a pruner left, or the values of the source."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from llmcompress.formats.gguf.tensors import unmultiplied
from llmcompress.store.checkpoint import DTYPES, Checkpoint
from llmcompress.store.staging import Staging

if TYPE_CHECKING:
    from llmcompress.engine.plan.plan import Plan


def unquantised_reader(plan: "Plan", checkpoint: Checkpoint, staged: Staging) -> Callable[[str], Tensor]:
    """A function that reads a finite tensor by its on-disk name, in its shape and type in the source."""
    pruned = {matrix.entry.source.name: matrix for matrix in plan.matrices if not matrix.entry.grid}

    def read(name: str) -> Tensor:
        matrix = pruned.get(name)
        if matrix is None:
            return checkpoint.read_finite(name)
        values = unmultiplied(staged.read_coded(matrix.layer, matrix.module).codes, matrix.factors)
        values = values.T.contiguous() if matrix.conv1d else values
        return values.to(DTYPES[matrix.entry.source.dtype])

    return read
