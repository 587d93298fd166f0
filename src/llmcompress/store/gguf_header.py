"""The contents of a GGUF file from its header alone: no tensor is read, and every statement of the header is checked.

GGUF 2 and 3, little-endian: `GGUF`, u32 version, u64 tensors, u64 key-values; the key-values; of each tensor its name,
u32 dimensions, u64 extents (fastest first), type, u64 offset; then, aligned, the data without gaps, in the same order.
"""

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcompress.errors import CheckpointError
from llmcompress.store.cursor import Cursor, mapped

_MAX_HEADER = 1 << 27  # that of the largest vocabulary known has some 20 MB
_MAX_KEY, _MAX_NAME, _MAX_DIMS = 65_535, 63, 4  # bytes, bytes, extents: what ggml reads
_DEFAULT_ALIGNMENT = 32
_COST = 1000  # most bytes of memory for a key-value or a tensor, besides its texts
_AGAIN = "fetch the file again"

# value types in the order of their ids, with their letter in `struct` and numpy
_TYPES = ("UINT8 B", "INT8 b", "UINT16 H", "INT16 h", "UINT32 I", "INT32 i", "FLOAT32 f", "BOOL ?", "STRING", "ARRAY",
          "UINT64 Q", "INT64 q", "FLOAT64 d")  # fmt: skip
_CODES = {name: code for name, _, code in (item.partition(" ") for item in _TYPES)}
_NAMES = tuple(_CODES)


@dataclass(frozen=True, slots=True)
class GgufArray:
    """The place of an array's elements in the file; `GgufHeader.value` reads the elements."""

    type: str
    count: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufField:
    """A value with its type's name in `gguf.GGUFValueType`; for an array (type ARRAY) only the array's place."""

    type: str
    value: int | float | str | GgufArray


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: shape in torch's order, id and name of its ggml type, where its bytes lie.

    offset: from the start of the data of its file. position: from the start of the file.
    """

    name: str
    type_id: int
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    position: int
    file: Path


@dataclass(frozen=True)
class GgufHeader:
    """One GGUF file, or all shards of a model with the key-values of the first shard."""

    path: Path
    version: int
    alignment: int
    data_start: int
    fields: Mapping[str, GgufField]
    tensors: Mapping[str, GgufTensor]
    files: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, those of all shards."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def value(self, key: str) -> int | float | str | list[str] | NDArray[Any]:
        """The value of a key; an array of numbers as numpy's, of texts as a list. CheckpointError without that key.

        Arrays are read from the file now, and each time.
        """
        if key not in self.fields:
            raise CheckpointError(f"{self.path} has no value for {key}")
        value = self.fields[key].value
        if not isinstance(value, GgufArray):
            return value
        data = mapped(self.path)
        if value.end > len(data):
            raise CheckpointError(f"{self.path} has changed since its header was read", _AGAIN)
        if value.type != "STRING":
            items = np.frombuffer(data, f"<{_CODES[value.type]}", value.count, value.begin)
            return items.view(np.uint8).astype(np.bool_) if value.type == "BOOL" else items.copy()
        cursor = Cursor(data, value.end)
        cursor.skip(value.begin)
        try:
            return cursor.texts(value.count)
        except ValueError as error:
            raise CheckpointError(f"{self.path} has damaged values of {key}: {error}", _AGAIN) from None


def scalar_value(header: GgufHeader, key: str) -> int | float | str | None:
    """The value of a key; None if the key is absent or holds an array."""
    field = header.fields.get(key)
    return None if field is None or isinstance(field.value, GgufArray) else field.value


def read_header(path: Path) -> GgufHeader:
    """The header of one GGUF file; CheckpointError names the file and the fault.

    Checked: counts, lengths and texts; types; every tensor within the file, in order, without gap or overlap.
    """
    data = mapped(path)
    version = _version(path, bytes(data[:8]))
    cursor = Cursor(data, _MAX_HEADER)
    cursor.skip(8)
    try:
        n_tensors, n_fields = cursor.number("Q"), cursor.number("Q")
        cursor.charge(_COST * (n_tensors + n_fields))
        fields = _fields(cursor, n_fields)
        alignment = _alignment(fields)
        infos = _infos(cursor, n_tensors, path)
        start = _padded(cursor.position, alignment)
        tensors = _placed(infos, start, alignment, len(data))
    except ValueError as error:
        raise CheckpointError(f"{path} has a damaged GGUF header: {error}", _AGAIN) from None
    return GgufHeader(path, version, alignment, start, fields, tensors, (path,))


def _version(path: Path, prefix: bytes) -> int:
    if len(prefix) < 8 or prefix[:4] != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file", "a GGUF file begins with the letters GGUF")
    version = int.from_bytes(prefix[4:], "little")
    if version & 0xFFFF == 0:
        raise CheckpointError(f"{path} is a big-endian GGUF file", "convert it with gguf-convert-endian to little")
    if version not in (2, 3):
        raise CheckpointError(f"{path} has version {version} of GGUF; 2 and 3 are read", "convert the model anew")
    return version


def _text(cursor: Cursor, longest: int) -> str:
    """A name; refuses control characters, which no program that saves models writes into names."""
    nbytes = cursor.number("Q")
    if not 0 < nbytes <= longest:
        raise ValueError(f"a name of {nbytes:,} bytes before byte {cursor.position:,}; 1 to {longest:,} are allowed")
    text = cursor.text(nbytes)
    if not text.isprintable():
        raise ValueError(f"a name that cannot be printed, {text!a}")
    return text


def _fields(cursor: Cursor, count: int) -> dict[str, GgufField]:
    fields: dict[str, GgufField] = {}
    for _ in range(count):
        key = _text(cursor, _MAX_KEY)
        if key in fields:
            raise ValueError(f"the key {key} stands twice")
        try:
            fields[key] = _field(cursor)
        except ValueError as error:
            raise ValueError(f"{error}, in the value of {key}") from None
    return fields


def _field(cursor: Cursor) -> GgufField:
    kind = _type_name(cursor)
    if kind != "ARRAY":
        return GgufField(kind, cursor.text(cursor.number("Q")) if kind == "STRING" else cursor.number(_CODES[kind]))
    element, count = _type_name(cursor), cursor.number("Q")
    if element == "ARRAY":
        raise ValueError("an array of arrays")
    if element == "STRING":
        begin = cursor.skip_texts(count)
    else:
        begin = cursor.skip(count * struct.calcsize(f"<{_CODES[element]}"))
    return GgufField(kind, GgufArray(element, count, begin, cursor.position))


def _type_name(cursor: Cursor) -> str:
    number: int = cursor.number("I")
    if number >= len(_NAMES):
        raise ValueError(f"unknown type {number}")
    return _NAMES[number]


def _alignment(fields: Mapping[str, GgufField]) -> int:
    field = fields.get("general.alignment", GgufField("UINT32", _DEFAULT_ALIGNMENT))
    if field.type != "UINT32" or not isinstance(field.value, int) or field.value.bit_count() != 1:
        raise ValueError("general.alignment is not a power of two in 32 bits")
    return field.value


def _infos(cursor: Cursor, count: int, path: Path) -> list[GgufTensor]:
    """Tensors as listed, with positions still to be found."""
    from gguf import GGML_QUANT_SIZES

    sizes = {kind.value: (kind.name, *size) for kind, size in GGML_QUANT_SIZES.items()}
    infos: dict[str, GgufTensor] = {}
    for _ in range(count):
        name = _text(cursor, _MAX_NAME)
        if name in infos:
            raise ValueError(f"tensor {name} stands twice")
        n_dims = cursor.number("I")
        if n_dims > _MAX_DIMS:
            raise ValueError(f"tensor {name} has {n_dims:,} dimensions; {_MAX_DIMS} at most are allowed")
        shape = tuple(cursor.number("Q") for _ in range(n_dims))[::-1]
        type_id, offset = cursor.number("I"), cursor.number("Q")
        if type_id not in sizes:
            raise ValueError(f"tensor {name} has type {type_id}, which the gguf package does not know")
        kind, block, nbytes = sizes[type_id]
        if 0 in shape or (shape or (1,))[-1] % block:
            raise ValueError(f"tensor {name} has shape {list(shape)}, which {kind} in blocks of {block} cannot hold")
        size = math.prod(shape) // block * nbytes
        infos[name] = GgufTensor(name, type_id, kind, shape, offset, size, 0, path)
    return list(infos.values())


def _placed(infos: Iterable[GgufTensor], start: int, alignment: int, size: int) -> dict[str, GgufTensor]:
    """Tensors by name with their positions, in a file of `size` bytes whose data begin at `start`."""
    tensors: dict[str, GgufTensor] = {}
    expected = 0
    for info in infos:
        if info.offset != expected:
            raise ValueError(f"tensor {info.name} begins at byte {info.offset:,} of the data, not at {expected:,}")
        if info.nbytes > size - start - info.offset:
            raise ValueError(f"the {size:,} bytes of the file end before tensor {info.name} does")
        tensors[info.name] = replace(info, position=start + info.offset)
        expected = _padded(info.offset + info.nbytes, alignment)
    if size > start + expected:
        raise ValueError(f"{size - start - expected:,} bytes belong to no tensor")
    return tensors


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
