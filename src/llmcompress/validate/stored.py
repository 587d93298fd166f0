"""Tensors of a safetensors directory by numpy alone: an independent reader, so that a mistake of the writer shows.

Imports nothing that takes part in writing (formats, packing, grids, store), on purpose.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

WIDTHS = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "U32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
FLOATS = ("F64", "F32", "F16", "BF16")
_NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "U32": "<u4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
    "BOOL": "?",
}
_CHUNK = 1 << 24  # bytes read at once
_MAX_JSON = 100_000_000  # bytes
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class DamageError(Exception):
    """A file is damaged; the message names the file and the damage."""


@dataclass(frozen=True)
class Tensor:
    """Type, shape and bytes of one tensor; bytes are read on demand."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    nbytes: int

    def raw(self) -> Array:
        """The tensor's bytes, mapped."""
        if self.nbytes == 0:
            return np.zeros(0, np.uint8)
        return np.memmap(self.file, np.uint8, "r", offset=self.begin, shape=(self.nbytes,))

    def array(self) -> Array:
        """Values in the stored type, mapped; bfloat16 and float8 as the integers that hold their bits."""
        return self.raw().view(_NUMPY[self.dtype]).reshape(self.shape)

    def floats(self, part: slice = slice(None), *, transposed: bool = False) -> Array:
        """The rows `part` as float32; if `transposed`, the columns `part` as rows."""
        values = self.array()[:, part].T if transposed else self.array()[part]
        if self.dtype == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)

    def chunks(self) -> Iterator[Array]:
        """The tensor's bytes in pieces of bounded size."""
        raw = self.raw()
        for begin in range(0, self.nbytes, _CHUNK):
            yield raw[begin : begin + _CHUNK]

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for piece in self.chunks():
            digest.update(piece.tobytes())
        return digest.hexdigest()

    def finite(self) -> bool:
        """Whether no value is infinite or not a number, by the exponent bits alone; integers always are."""
        if self.dtype not in FLOATS:
            return True
        unsigned, exponent = {
            "F64": ("<u8", 0x7FF0 << 48),
            "F32": ("<u4", 0x7F80 << 16),
            "F16": ("<u2", 0x7C00),
            "BF16": ("<u2", 0x7F80),
        }[self.dtype]
        mask = np.dtype(unsigned).type(exponent)
        return not any(bool(((piece.view(unsigned) & mask) == mask).any()) for piece in self.chunks())

    def equals(self, other: "Tensor") -> bool:
        """Whether type, shape and every byte agree."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        return all(np.array_equal(mine, theirs) for mine, theirs in zip(self.chunks(), other.chunks(), strict=True))


def read_json(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():  # a pipe would block for ever
        raise DamageError(f"{path.name} is not a file")
    try:
        if path.stat().st_size > _MAX_JSON:
            raise DamageError(f"{path.name} has {path.stat().st_size:,} bytes, {_MAX_JSON:,} at most are read")
        value = _parsed(path.read_bytes())
    except FileNotFoundError:
        raise DamageError(f"{path.name} is missing") from None
    except (ValueError, OSError, RecursionError) as error:
        raise DamageError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DamageError(f"{path.name} does not hold an object")
    return value


def _parsed(raw: bytes) -> Any:
    """JSON from bytes; ValueError for what would take many times its size, such as a million empty lists."""
    if 64 * (raw.count(b"[") + raw.count(b"{")) + 36 * raw.count(b",") > 16 * len(raw) + (1 << 20):
        raise ValueError("it would take many times its size")
    return json.loads(raw)


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of an output by name, every length, offset and index entry checked; or DamageError.

    A weight file that the index does not name, or a second one without an index, is damage.
    """
    present = sorted(file.name for file in directory.glob("*.safetensors"))
    weight_map, metadata = _index(directory)
    if weight_map is None:
        if len(present) != 1:
            raise DamageError(f"{len(present)} weight files and no {INDEX}")
        return _file(directory / present[0])
    named = sorted(set(map(str, weight_map.values())))
    if named != present:
        raise DamageError(f"{INDEX} names {', '.join(named)}; present are {', '.join(present) or 'none'}")
    tensors = _indexed(directory, weight_map)
    if unnamed := sorted(tensors.keys() - weight_map.keys()):
        raise DamageError(f"{unnamed[0]} lies in {tensors[unnamed[0]].file.name}, and {INDEX} does not say so")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    held = sum(tensor.nbytes for tensor in tensors.values())
    if total is not None and total != held:
        raise DamageError(f"{INDEX} speaks of {total} bytes, the tensors have {held}")
    return tensors


def read_source(directory: Path) -> dict[str, Tensor]:
    """The tensors that a run reads of a model, by name: of the files that its index names, whatever lies beside them.

    Without an index these are of model.safetensors, or of the only file. DamageError.
    """
    weight_map, _ = _index(directory)
    if weight_map is not None:
        return _indexed(directory, weight_map)
    files = [directory / SINGLE] if (directory / SINGLE).exists() else sorted(directory.glob("*.safetensors"))
    if len(files) != 1:
        raise DamageError(f"{len(files)} weight files and no {INDEX}")
    return _file(files[0])


def _index(directory: Path) -> tuple[dict[str, Any] | None, Any]:
    """The file of every tensor, None without an index, and the index's metadata."""
    if not (directory / INDEX).exists():
        return None, None
    entries = read_json(directory / INDEX)
    weight_map = entries.get("weight_map")
    if not isinstance(weight_map, dict):
        raise DamageError(f"{INDEX} has no weight_map")
    return weight_map, entries.get("metadata")


def _indexed(directory: Path, weight_map: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(map(str, weight_map.values()))):
        for tensor in _file(directory / name).values():
            if weight_map.get(tensor.name, name) != name or tensor.name in tensors:
                raise DamageError(f"{tensor.name} lies in {name}, and {INDEX} does not say so")
            tensors[tensor.name] = tensor
    if missing := sorted(weight_map.keys() - tensors.keys()):
        raise DamageError(f"{missing[0]} is named by {INDEX} and lies in no file")
    return tensors


def is_blob(file: Path) -> bool:
    """Whether a file is a link into the blobs of the download cache that its directory belongs to."""
    folder = file.parent.resolve()
    return folder.parent.name == "snapshots" and folder.parent.parent / "blobs" in file.resolve().parents


def _file(path: Path) -> dict[str, Tensor]:
    if not path.is_file():  # a pipe would block for ever
        raise DamageError(f"{path.name} is not a file")
    if path.parent.resolve() not in path.resolve().parents and not is_blob(path):
        raise DamageError(f"{path.name} is a link that leaves its directory")
    size = path.stat().st_size
    with path.open("rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, _MAX_JSON):
            raise DamageError(f"{path.name} is cut off within its header ({size} bytes)")
        text = handle.read(length)
    try:
        header = _parsed(text)
        header.pop("__metadata__", None)
        tensors = sorted((_tensor(path, 8 + length, name, item) for name, item in header.items()), key=_position)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DamageError(f"{path.name} has a damaged header: {error}") from None
    position = 8 + length
    for tensor in tensors:
        if tensor.begin != position:
            raise DamageError(f"{path.name} has a gap or an overlap before {tensor.name}")
        position += tensor.nbytes
    if position != size:
        raise DamageError(f"{path.name} has {size} bytes, its header speaks of {position}")
    return {tensor.name: tensor for tensor in tensors}


def _position(tensor: Tensor) -> tuple[int, int]:
    return tensor.begin, tensor.nbytes


def _tensor(path: Path, data: int, name: str, item: Mapping[str, Any]) -> Tensor:
    dtype, shape = item["dtype"], tuple(int(extent) for extent in item["shape"])
    begin, end = (int(offset) for offset in item["data_offsets"])
    expected = WIDTHS[dtype]
    for extent in shape:
        expected *= extent
    if end - begin != expected or min(shape, default=0) < 0:
        raise ValueError(f"{name} is {dtype} {list(shape)} in {end - begin} bytes")
    return Tensor(name, dtype, shape, path, data + begin, expected)


def unpack(words: Array, bits: int, count: int) -> tuple[Array, bool]:
    """Unpack rows of int32 words, lowest bits first: values uint8 [rows, count], and whether the rest is zero."""
    stream = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    rows, eights = len(stream), -(-count // 8)  # eight values fill whole bytes, as many as a value has bits
    held = stream[:, : eights * bits]
    padded = np.pad(held, ((0, 0), (0, eights * bits - held.shape[1])))
    numbers = np.zeros((rows, eights, 8), np.uint8)
    numbers[:, :, :bits] = padded.reshape(rows, eights, bits)
    packed = numbers.view("<u8")[:, :, 0]
    values = np.empty((rows, eights, 8), np.uint8)
    for place in range(8):
        values[:, :, place] = (packed >> np.uint64(place * bits)) & np.uint64((1 << bits) - 1)
    flat = values.reshape(rows, 8 * eights)
    return flat[:, :count], not (flat[:, count:].any() or stream[:, eights * bits :].any())


def words_for(count: int, bits: int) -> int:
    return -(-count * bits // 32)
