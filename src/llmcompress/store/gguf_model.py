"""A whole GGUF model: all its shards, and the bytes and values of its tensors."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcompress.errors import CheckpointError
from llmcompress.formats.gguf.types import FACTORED, factor_name
from llmcompress.store.cursor import mapped
from llmcompress.store.gguf_header import GgufField, GgufHeader, GgufTensor, read_header
from llmcompress.store.gguf_name import shard_of
from llmcompress.store.headers import inside

_AGAIN = "fetch the file again"
_DECODED_AT_ONCE = 1 << 20  # values


def read_gguf(path: Path) -> GgufHeader:
    """The header of a whole model; if `path` is one shard of several, the headers of all shards joined.

    CheckpointError if one is missing or belongs to another model.
    """
    header = read_header(path)
    number, count, _ = _split(header)
    if count <= 1:
        return header
    shard = shard_of(path)
    if shard is None or (shard.number, shard.count) != (number + 1, count):
        raise CheckpointError(
            f"{path} is shard {number + 1} of {count}, but its name does not say so", "give the file its name again"
        )
    files = [path.with_name(f"{shard.stem}-{at + 1:05d}-of-{count:05d}.gguf") for at in range(count)]
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file} is missing, a shard of the model of {path.name}", "fetch the missing shard")
    return _joined([header if file == path else read_header(inside(path.parent, file)) for file in files])


def tensor_bytes(header: GgufHeader, name: str) -> NDArray[np.uint8]:
    """The bytes of a tensor [nbytes], mapped from its file, read-only; CheckpointError without that tensor."""
    if name not in header.tensors:
        raise CheckpointError(f"{header.path} has no tensor {name}")
    tensor = header.tensors[name]
    data = mapped(tensor.file)
    if tensor.position + tensor.nbytes > len(data):
        raise CheckpointError(f"{tensor.file} has changed since its header was read", _AGAIN)
    return np.frombuffer(data, np.uint8, tensor.nbytes, tensor.position)


def decodable(tensor: GgufTensor) -> bool:
    """Whether the gguf package decodes the type of a tensor."""
    import gguf

    kind = gguf.GGMLQuantizationType(tensor.type_id)
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def rows_of(header: GgufHeader, name: str) -> int:
    """Rows of a tensor seen as a matrix with rows of the last extent: the rows of all experts together."""
    return math.prod(header.tensors[name].shape[:-1])


def decoded(header: GgufHeader, name: str, begin: int = 0, end: int | None = None) -> NDArray[np.float32]:
    """Rows `begin` to `end` of a tensor seen as a matrix, float32 [end - begin, width]; CheckpointError if gguf cannot.

    A type whose matrices have factors in a tensor of their own is multiplied by these. Damaged scales may give
    infinities and NaN.
    """
    import gguf

    whole = tensor_bytes(header, name)
    tensor = header.tensors[name]
    raw = whole.reshape(rows_of(header, name), -1)[begin:end]
    kind = gguf.GGMLQuantizationType(tensor.type_id)
    width = (tensor.shape or (1,))[-1]
    out = np.empty((len(raw), width), np.float32)
    step = max(1, _DECODED_AT_ONCE // width)
    with np.errstate(all="ignore"):
        for at in range(0, len(raw), step):
            try:
                out[at : at + step] = gguf.quants.dequantize(raw[at : at + step], kind)
            except NotImplementedError:
                raise CheckpointError(
                    f"{tensor.file}: tensor {name} has type {tensor.type}, which gguf cannot decode"
                ) from None
        factors = factors_of(header, name)
        if factors is not None:
            first, last = begin, begin + len(raw)
            out *= factors.repeat(rows_of(header, name) // len(factors))[first:last, np.newaxis]
    return out


def factors_of(header: GgufHeader, name: str) -> NDArray[np.float32] | None:
    """What the matrices of a tensor are multiplied by, one factor for each; None without such a tensor.

    CheckpointError where there are not as many factors as matrices.
    """
    tensor, stored = header.tensors[name], header.tensors.get(factor_name(name))
    if stored is None or tensor.type not in FACTORED or not name.endswith(".weight"):
        return None
    found = tensor_bytes(header, stored.name).view(np.float32) if stored.type == "F32" else np.empty(0, np.float32)
    if len(found) not in (1, tensor.shape[0] if len(tensor.shape) > 2 else 1):
        raise CheckpointError(f"{stored.file}: tensor {stored.name} does not hold a factor for each matrix of {name}")
    return found


def is_factor(header: GgufHeader, name: str) -> bool:
    """Whether a tensor holds the factors of another one."""
    other = header.tensors.get(f"{name.removesuffix('.scale')}.weight")
    return name.endswith(".scale") and other is not None and other.type in FACTORED


def _split(header: GgufHeader) -> tuple[int, ...]:
    """The number of this shard from 0, the count of shards, and the count of tensors in all shards."""
    found = []
    for key, default in (("split.no", 0), ("split.count", 0), ("split.tensors.count", len(header.tensors))):
        field = header.fields.get(key, GgufField("INT32", default))
        if "INT" not in field.type or not isinstance(field.value, int):
            raise CheckpointError(f"{header.path} has {key} of type {field.type}, not a whole number", _AGAIN)
        found.append(field.value)
    return tuple(found)


def _joined(shards: Sequence[GgufHeader]) -> GgufHeader:
    """All tensors, with the key-values of the first shard, the only shard that holds the model's key-values."""
    tensors: dict[str, GgufTensor] = {}
    total = _split(shards[0])[2]
    for number, shard in enumerate(shards):
        if _split(shard) != (number, len(shards), total):
            raise CheckpointError(f"{shard.path} is not shard {number + 1} of the model beside it", _AGAIN)
        for name, tensor in shard.tensors.items():
            if name in tensors:
                raise CheckpointError(f"tensor {name} stands in both {tensors[name].file} and {tensor.file.name}")
            tensors[name] = tensor
    if len(tensors) != total:
        raise CheckpointError(f"{shards[0].path} and its shards have {len(tensors)} tensors, not {total}", _AGAIN)
    return replace(shards[0], tensors=tensors, files=tuple(shard.path for shard in shards))
