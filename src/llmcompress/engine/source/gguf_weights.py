"""A GGUF file compared with its source checkpoint: which rows of the file hold which source tensor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmcompress.errors import CheckpointError
from llmcompress.formats.gguf.family import find
from llmcompress.formats.gguf.keys import Key
from llmcompress.formats.gguf.metadata import architecture, listed_names, metadata
from llmcompress.formats.gguf.names import gguf_tensors
from llmcompress.formats.gguf.tensors import FORMS, GGUFTensor, unmultiplied
from llmcompress.formats.gguf.types import FACTORED, FILE_TYPES
from llmcompress.grids.coded import Coded
from llmcompress.grids.grid_type import gguf_specs
from llmcompress.packing.ggml import unpack
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.gguf_header import GgufHeader, scalar_value
from llmcompress.store.gguf_model import decoded, is_factor, rows_of, tensor_bytes
from llmcompress.store.headers import ModelHeaders

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


def expected_tensors(header: GgufHeader, source: ModelHeaders) -> list[GGUFTensor]:
    """The tensors of a GGUF file made from `source`; CheckpointError if `source` cannot become a GGUF file.

    header: the file's header, which tells how many rows of the embedding remain.
    """
    embedding = header.tensors.get(_EMBEDDING)
    rows = None if embedding is None else embedding.shape[0]
    config, shapes = source.config, {name: stored.spec.shape for name, stored in source.tensors.items()}
    tensors = gguf_tensors(config, list(shapes.items()), rows)
    if _HEAD in header.tensors and _HEAD not in {tensor.name for tensor in tensors}:  # untied, as by a rotation
        table = next(tensor for tensor in tensors if tensor.name == _EMBEDDING).sources[0]
        shapes[f"{find(config).head}.weight"] = shapes[table]
        tensors = gguf_tensors({**config, "tie_word_embeddings": False}, list(shapes.items()), rows)
    return tensors


def expected_keys(source: ModelHeaders, tensors: Sequence[GGUFTensor]) -> list[Key]:
    """The hyperparameters of a GGUF file made from `source`."""
    prefix = f"{architecture(source.config)}."
    keys = metadata(source.config, tensors, FILE_TYPES["F32"], "model")
    return [key for key in keys if key.name.startswith(prefix)]


def source_mismatches(header: GgufHeader, source: ModelHeaders, tensors: Sequence[GGUFTensor]) -> list[str]:
    """Differences in architecture, tensors, shapes or hyperparameters that rule `source` out as a file's source."""
    arch, said = architecture(source.config), scalar_value(header, "general.architecture")
    if arch != said:
        return [f"its architecture is {said}, not {arch}"]
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    shapes |= {name: stored.shape for name, stored in header.tensors.items() if is_factor(header, name)}
    wrong = [f"tensor {name} is missing" for name in shapes if name not in header.tensors]
    wrong += [f"tensor {name} does not come from it" for name in header.tensors if name not in shapes]
    wrong += [
        f"tensor {name} is {list(stored.shape)}, not {list(shapes[name])}"
        for name, stored in header.tensors.items()
        if name in shapes and _extents(stored.shape) != _extents(shapes[name])
    ]
    for key in expected_keys(source, tensors):
        if isinstance(key.value, tuple):
            continue  # `gguf_keys` compares them
        value = scalar_value(header, key.name)
        expected = float(np.float32(key.value)) if isinstance(key.value, float) else key.value
        if key.name in header.fields and value != expected:
            wrong.append(f"{key.name} is {value}, not {expected}")
    return wrong


def _extents(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without its leading ones, which GGUF files do not keep."""
    first = next((at for at, extent in enumerate(shape) if extent != 1), len(shape) - 1)
    return tuple(shape[first:])


@dataclass(frozen=True)
class EncodedRows:
    """Rows `begin` to `end` of a GGUF tensor, which hold one source tensor of that shape."""

    tensor: GGUFTensor
    shape: tuple[int, ...]
    begin: int
    end: int

    def raw(self, header: GgufHeader) -> Tensor:
        """The bytes of the rows [rows, bytes] uint8."""
        rows = tensor_bytes(header, self.tensor.name).reshape(rows_of(header, self.tensor.name), -1)
        return torch.from_numpy(rows[self.begin : self.end].copy())

    def values(self, header: GgufHeader) -> Tensor:
        """The stored values of the rows, float32."""
        return torch.from_numpy(decoded(header, self.tensor.name, self.begin, self.end)).reshape(self.shape)


def parts_of(header: GgufHeader, tensor: GGUFTensor) -> list[EncodedRows]:
    """One part for each source of a tensor, in order; a computed tensor is one part."""
    count = max(1, len(tensor.sources))
    rows = rows_of(header, tensor.name) // count
    shape = tensor.shape if count == 1 else (rows, tensor.shape[-1])[int(rows == 1 and len(tensor.shape) < 3) :]
    return [EncodedRows(tensor, shape, number * rows, (number + 1) * rows) for number in range(count)]


def _numbers_of_layers(header: GgufHeader, source: ModelHeaders) -> Iterator[tuple[str, float]]:
    """Tensors of the source that the file has as numbers of a key; CheckpointError where the key has not that many."""
    for key, by_layer in listed_names(find(source.config), source.tensors).items():
        numbers = np.ravel(np.asarray(header.value(key), np.float32)) if key in header.fields else np.zeros(0)
        if sorted(by_layer) != list(range(len(numbers))):
            raise CheckpointError(f"{header.path} lists {len(numbers)} numbers as {key}, not one for each layer")
        for layer, name in by_layer.items():
            yield name, float(numbers[layer])


class GgufWeights(Checkpoint):
    """The tensors of `source` by on-disk name, with values from a GGUF file made from `source`.

    Rows are put back in order, factors divided out, offsets subtracted, experts unstacked. Embedding rows without a
    token, which the file lacks, come from the source. CheckpointError if the file was made from another model.
    parts: the rows of the file that hold each tensor.
    """

    def __init__(self, header: GgufHeader, source: Checkpoint) -> None:
        super().__init__(source.headers)
        self.header, self.source = header, source
        tensors = expected_tensors(header, source.headers)
        if wrong := source_mismatches(header, source.headers, tensors):
            raise CheckpointError(
                f"{header.path} was not made from {source.path}: {wrong[0]}",
                "give the model it was made from as --ref",
            )
        self.parts: dict[str, list[EncodedRows]] = {}
        self._shapes = {name: stored.spec.shape for name, stored in source.headers.tensors.items()}
        self._listed = dict(_numbers_of_layers(header, source.headers))
        embedding = next(tensor for tensor in tensors if tensor.name == _EMBEDDING)
        for tensor in tensors:
            names = tensor.sources
            if tensor.name == _HEAD and (names == embedding.sources or names[0] not in self._shapes):
                names = (f"{find(source.headers.config).head}.weight",)  # the file's head, tied in the source or not
                self._shapes[names[0]] = self._shapes[embedding.sources[0]]
            for name, part in zip(names, parts_of(header, tensor), strict=False):
                self.parts.setdefault(name, []).append(part)

    def __contains__(self, name: str) -> bool:
        return name in self.parts or name in self._listed

    def coded(self, module: str) -> Coded | None:
        """Codes [out, in] of a module's matrix if the matrix is one tensor of a type of codes; else None."""
        name = f"{module}.weight"
        parts = self.parts.get(name, [])
        if len(parts) != 1 or len(parts[0].shape) != 2 or parts[0].shape != self._shapes[name]:
            return None
        (part,) = parts
        if not part.tensor.by_rows or part.tensor.factors:
            return None
        stored = self.header.tensors[part.tensor.name]
        spec = gguf_specs().get(stored.type)
        if spec is None or stored.type in FACTORED or part.tensor.transposed or part.tensor.offset:
            return None
        return unpack(part.raw(self.header), spec).rows(torch.argsort(_rows(part.tensor, part.shape[0])))

    def inputs(self, module: str) -> None:
        """No GGUF file rounds the inputs of a matrix."""

    def rows(self, name: str) -> None:
        """No rows are read alone: those of the file may be codes, and in another order."""

    def read_at(self, name: str, number: int) -> Tensor:
        return self.read(name)[number]

    def read(self, name: str) -> Tensor:
        """A tensor in its source's shape, float32."""
        if name in self._listed:
            return torch.full(self._shapes[name], self._listed[name])
        if name not in self.parts:
            raise CheckpointError(f"tensor {name} is not in {self.header.path}")
        parts = self.parts[name]
        first, out = parts[0].tensor, torch.empty(self._shapes[name])
        axis = -2 if out.ndim > 1 else 0
        extents = first.viewed(out).shape
        indices = [_rows(part.tensor, extents[axis]) for part in parts]
        if sum(map(len, indices)) != extents[axis]:
            out = self.source.read(name).to(torch.float32)
        view = first.viewed(out)
        for part, index in zip(parts, indices, strict=True):
            view.index_copy_(axis, index, _undone(part, self.header).reshape(_extents_of(view, axis, len(index))))
        return out


def _undone(part: EncodedRows, header: GgufHeader) -> Tensor:
    """The values of rows as their source has them, whichever way they are stored in the file."""
    tensor = part.tensor
    rows = slice(None) if tensor.rows is None else tensor.rows.index()
    values = unmultiplied(part.values(header), tensor.factors, rows)
    values = values - tensor.offset if tensor.offset else values
    values = FORMS[tensor.form][1](values) if tensor.form else values
    values = values.mT if tensor.turned else values
    return values if tensor.inputs is None else values[..., torch.argsort(tensor.inputs.index())]


def _extents_of(view: Tensor, axis: int, count: int) -> list[int]:
    extents = list(view.shape)
    extents[axis] = count
    return extents


def _rows(tensor: GGUFTensor, count: int) -> Tensor:
    """The source row of each row of a tensor, int64 [rows]; the source has `count` rows."""
    return torch.arange(count) if tensor.rows is None else tensor.rows.index()
