"""Writing GGUF files: codes come from the work directory, all other tensors from the checkpoint."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from llmcompress.engine.write.unquantised import unquantised_reader
from llmcompress.errors import RunError
from llmcompress.formats.gguf.bounds import farthest
from llmcompress.formats.gguf.file import ENCODED_AT_ONCE, GgufFile, Placed, padded
from llmcompress.formats.gguf.tensors import pieces
from llmcompress.grids.grid_type import gguf_specs
from llmcompress.store.files import bytes_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from llmcompress.engine.plan.plan import Plan
    from llmcompress.grids.base import Search
    from llmcompress.store.checkpoint import Checkpoint
    from llmcompress.store.output import OutputDirectory
    from llmcompress.store.staging import Staging
    from llmcompress.workers import Workers

_DECODED_AT_ONCE = 1 << 18  # weights


def write_gguf(
    plan: "Plan", checkpoint: "Checkpoint", staged: "Staging", out: "OutputDirectory", workers: "Workers"
) -> dict[str, str]:
    """Write the files of a plan; SHA-256 (hex) of each tensor's bytes by its name."""
    hashes: dict[str, str] = {}
    data = _Data(plan, checkpoint, staged, workers)
    for file in plan.files:
        out.write_pieces(file.name, _file_pieces(file, data, hashes))
    return hashes


def _file_pieces(file: GgufFile, data: "_Data", hashes: dict[str, str]) -> Iterator[bytes | memoryview]:
    yield file.header
    for placed in file.tensors:
        total = hashlib.sha256()
        for piece in data.of(placed):
            total.update(piece)
            yield piece
        yield bytes(padded(placed.nbytes) - placed.nbytes)
        hashes[placed.tensor.name] = total.hexdigest()


class _Data:
    """The bytes of every tensor of a plan."""

    def __init__(self, plan: "Plan", checkpoint: "Checkpoint", staged: "Staging", workers: "Workers") -> None:
        self.plan, self.checkpoint, self.staged, self.workers = plan, checkpoint, staged, workers
        assert plan.recipe.method is not None  # a GGUF file holds what a step rounds
        self.search = plan.recipe.method.search
        self.matrices = {matrix.entry.source.name: matrix for matrix in plan.matrices if matrix.entry.grid}
        self.read = unquantised_reader(plan, checkpoint, staged)
        self.factors: dict[str, Tensor] = {}  # of matrices whose codes are written, until theirs follow

    def of(self, placed: Placed) -> Iterator[memoryview]:
        """The bytes of a tensor, piece by piece."""
        import torch

        tensor = placed.tensor
        stored = self.checkpoint.stored(tensor.name, placed.type.name)
        if stored is not None:
            yield from stored
            return
        if tensor.factor_of:
            yield bytes_of(torch.cat([self.factors.pop(name) for name in tensor.factor_of]))
            return
        if not tensor.sources or any(name not in self.matrices for name in tensor.sources):
            yield from self._encoded(placed)
            return
        index = None if tensor.rows is None else tensor.rows.index()
        for name in tensor.sources:
            matrix = self.matrices[name]
            coded = self.staged.read_coded(matrix.layer, matrix.module)
            if (factor := coded.grid.gguf_factor) is not None:
                self.factors[name] = factor
            entry = matrix.entry
            if index is not None:
                coded = coded.rows(index)
                entry = replace(entry, source=replace(entry.source, shape=(len(index), entry.in_features)))
            yield from (bytes_of(part) for part in self.plan.format.encode(entry, coded).values())

    def _encoded(self, placed: Placed) -> Iterator[memoryview]:
        """The bytes of a tensor that no method rounds: a norm, a bias, the embedding, the head."""
        costs = None if self.plan.importance is None else self.plan.importance.tensors.get(placed.tensor.name)
        for number, piece in enumerate(pieces(placed.tensor, self.read)):
            importance = None if costs is None else costs[number]
            step = max(1, ENCODED_AT_ONCE // piece.shape[-1]) if len(piece.shape) > 1 else len(piece)
            lost = whole = 0.0
            for start in range(0, len(piece), step):
                values = piece.rows(start, start + step)
                found = encoded(values, placed.type.name, self.search, self.workers, importance)
                if placed.type.name != "F32" and values.ndim > 1:  # F32 holds every value
                    error, energy = _squares(found, values, placed.type.name)
                    lost, whole = lost + error, whole + energy
                del values
                yield bytes_of(found)
            bound = farthest(placed.type.name, whole, math.prod(piece.shape))
            if lost and not math.sqrt(lost / (whole or 1.0)) < bound:
                raise RunError(
                    f"{placed.type.name} does not hold the values of {placed.tensor.name}",
                    f"give it a wider type, such as --tensor-type {placed.tensor.name.removesuffix('.weight')}=F32",
                )


def _squares(rows: "Tensor", values: "Tensor", kind: str) -> tuple[float, float]:
    """Sums of squares in float64: of what rows [rows, bytes] of a type stand for less values [rows, width]; of values.

    In float64, since float32 has no squares of values of 1e-30.
    """
    from torch import float64
    from torch.linalg import vector_norm as norm

    error = energy = 0.0
    step = max(1, _DECODED_AT_ONCE // values.shape[-1])
    for start in range(0, len(values), step):
        part = values[start : start + step].to(float64)
        energy += float(norm(part)) ** 2
        error += float(norm(part.sub_(decoded(rows[start : start + step], kind)))) ** 2
    return error, energy


def encoded(
    values: "Tensor",
    kind: str,
    search: "Search",
    workers: "Workers",
    importance: "NDArray[np.float32] | None" = None,
) -> "Tensor":
    """Rows float32 [rows, width] in a type of GGML: uint8 [rows, bytes]. importance: of the inputs [width]."""
    import torch

    from llmcompress.grids.encoders import encode
    from llmcompress.packing.ggml import pack
    from llmcompress.packing.plain import plain

    spec = gguf_specs().get(kind)
    if spec is not None:
        costs = None if importance is None else torch.from_numpy(importance)
        return pack(encode(values, spec, search, workers, costs))
    return plain(values, kind)


def decoded(rows: "Tensor", kind: str) -> "Tensor":
    """The values float32 [rows, width] that rows [rows, bytes] of a type stand for."""
    from llmcompress.packing.ggml import unpack
    from llmcompress.packing.plain import plain_values

    spec = gguf_specs().get(kind)
    return plain_values(rows, kind) if spec is None else unpack(rows, spec).decode()
