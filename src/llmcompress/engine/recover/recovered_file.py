"""A GGUF file written anew: the rows of matrices that are trained, and gains, have other values, all else its bytes."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from llmcompress.engine.source.gguf_weights import EncodedRows, GgufWeights
from llmcompress.engine.train.trained import Trained, TrainedMatrix
from llmcompress.formats.gguf.tensors import convert
from llmcompress.packing.ggml import pack
from llmcompress.store.cursor import mapped
from llmcompress.store.gguf_model import rows_of, tensor_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmcompress.grids.coded import Coded


def trained_matrix(weights: GgufWeights, module: str) -> TrainedMatrix | None:
    """The matrix of a module, if its blocks have a free float16 scale, and its codes come back byte for byte."""
    found = TrainedMatrix.of(module, partial(weights.coded, module), torch.float16, transposed=False)
    if found is None:
        return None
    (part,) = weights.parts[f"{module}.weight"]
    same = torch.equal(_packed(part, found.coded()), part.raw(weights.header))
    return found if same else None


def holds_gains(weights: GgufWeights, name: str) -> bool:
    """Whether the file holds the tensor of a norm as float32, and as nothing else."""
    parts = weights.parts.get(name, [])
    return bool(parts) and all(weights.header.tensors[part.tensor.name].type == "F32" for part in parts)


def pieces(weights: GgufWeights, trained: Mapping[str, Trained], hashes: dict[str, str]) -> Iterator[memoryview]:
    """The bytes of the file, piece by piece; `hashes` gets the SHA-256 (hex) of every tensor's bytes by its name."""
    moved: dict[str, list[tuple[EncodedRows, str]]] = {}
    for name in trained:
        for part in weights.parts[name]:
            moved.setdefault(part.tensor.name, []).append((part, name))
    header = weights.header
    data, position = memoryview(mapped(header.path)), 0
    for tensor in header.tensors.values():
        whole = tensor_bytes(header, tensor.name)
        if tensor.name in moved:
            whole = whole.copy()
            for part, name in moved[tensor.name]:
                rows = whole.reshape(rows_of(header, tensor.name), -1)[part.begin : part.end]
                rows[:] = _encoded(part, trained[name], name)
        hashes[tensor.name] = hashlib.sha256(whole.data).hexdigest()
        yield data[position : tensor.position]  # the header, or what fills up the tensor before
        yield whole.data
        position = tensor.position + tensor.nbytes
    yield data[position:]


def _encoded(part: EncodedRows, trained: Trained, name: str) -> "NDArray[np.uint8]":
    """The bytes of rows of the file [rows, bytes] that hold a tensor of the source, as it is now."""
    if isinstance(trained, TrainedMatrix):
        return _packed(part, trained.coded()).numpy()
    alone = replace(part.tensor, shape=part.shape, sources=(name,))
    values = convert(alone, lambda _: trained.value())
    return values.reshape(part.end - part.begin, -1).view(torch.uint8).numpy()


def _packed(part: EncodedRows, coded: "Coded") -> torch.Tensor:
    """The bytes of rows of the file [rows, bytes] that hold a matrix."""
    index = None if part.tensor.rows is None else part.tensor.rows.index()
    return pack(coded if index is None else coded.rows(index))
