"""Importance matrices as llama.cpp's files: the GGUF kind, and the legacy kind of older programs (.dat).

GGUF: three keys `imatrix.*`, and two float32 tensors of each entry, `NAME.in_sum2` [n_mat, n_in] and `NAME.counts`
[n_mat, 1]. Legacy, all little-endian: i32 entries; of each i32 length and name, i32 calls, i32 values, and as float32
the mean squares times the calls; then i32 chunks, i32 length and name of the text, which old files lack.

Files written here have a checksum, which other programs pass over: the key `llmcompress.sha256`, or 8 bytes at the end.
"""

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcompress.errors import CalibrationError, LlmcompressError, PlanError
from llmcompress.formats.gguf.imatrix import Imatrix, ImatrixEntry
from llmcompress.store.claim import Claim
from llmcompress.store.cursor import Cursor, mapped
from llmcompress.store.files import writing
from llmcompress.store.gguf_header import GgufHeader, read_header
from llmcompress.store.gguf_model import tensor_bytes
from llmcompress.store.output import flush
from llmcompress.store.unfinished import claimed, refuse_unclaimable

_SUMS, _COUNTS = ".in_sum2", ".counts"
_CHUNK = 512  # tokens: what llama-imatrix takes unless told otherwise; a legacy file does not say
_MOST_CALLS = 2**31 - 1
_LEAST = 17  # bytes of a legacy entry
_SHA256 = "llmcompress.sha256"  # a key: of all that the file says
_SUM = b"CRC\0"  # before the CRC-32 of all bytes before it, at the end of a legacy file
_COST = 1000  # bytes that an entry takes here, at most, besides its values
_AGAIN = "collect it again with llama-imatrix, or fetch the file again"


def read_imatrix(path: Path) -> Imatrix:
    """The importance matrix in a file of either kind, told apart by content.

    CheckpointError or CalibrationError, naming the file, if it is damaged. Legacy files are taken to have been made in
    chunks of 512 tokens, and hold one row for all experts of a tensor: `imatrix.split_experts` tells them apart.
    """
    data = mapped(path)
    try:
        return _of_gguf(read_header(path)) if bytes(data[:4]) == b"GGUF" else _of_legacy(data)
    except CalibrationError as error:
        raise CalibrationError(f"{path}: {error.message}", error.hint) from None
    except ValueError as error:
        raise CalibrationError(f"{path} is not a whole importance matrix: {error}", _AGAIN) from None


def refuse_place(path: Path, overwrite: bool = False) -> None:
    """PlanError if no importance matrix may be written to `path`; one may replace another where `overwrite` says so."""
    refuse_unclaimable(path)
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise PlanError(f"{path} exists", "give another name, or --overwrite")
    if path.is_symlink() or not path.is_file():
        raise PlanError(f"{path} is not a file, so it is not overwritten", "give another name")
    try:
        read_imatrix(path)
    except LlmcompressError:
        raise PlanError(f"{path} is no importance matrix, so it is not overwritten", "give another name") from None


def write_imatrix(path: Path, imatrix: Imatrix, overwrite: bool = False, claim: Claim | None = None) -> None:
    """A new GGUF file, the same bytes for the same values. As `refuse_place`; RunError if the system refuses it.

    claim: on `path`, where the caller has it already.
    """
    import gguf

    imatrix = replace(imatrix, datasets=imatrix.datasets or ("unknown",))  # none would not be written
    with _appearing(path, overwrite, claim) as partial:
        writer = gguf.GGUFWriter(partial, "")
        writer.kv_data[0].clear()  # the architecture, which these files do not have
        writer.add_type("imatrix")
        writer.add_string(_SHA256, _hash(imatrix))
        writer.add_array("imatrix.datasets", list(imatrix.datasets))
        writer.add_uint32("imatrix.chunk_count", imatrix.chunk_count)
        writer.add_uint32("imatrix.chunk_size", imatrix.chunk_size)
        for name, entry in sorted(imatrix.entries.items()):
            writer.add_tensor(name + _SUMS, np.ascontiguousarray(entry.sum2, np.float32))
            writer.add_tensor(name + _COUNTS, np.ascontiguousarray(entry.counts[:, None], np.float32))
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def write_legacy(path: Path, imatrix: Imatrix, overwrite: bool = False, claim: Claim | None = None) -> None:
    """A new file of the legacy kind, which holds means only: experts without data get ones. Errors as `write_imatrix`.

    Such a file does not say how long its chunks are: they are counted as chunks of 512 tokens, as they are read. Of
    several datasets the last is named.
    """
    pieces = [struct.pack("<i", len(imatrix.entries))]
    for name, entry in sorted(imatrix.entries.items()):
        calls = min(max(math.ceil(float(entry.counts.max()) / _CHUNK), 1), _MOST_CALLS)
        values = np.where(entry.counts[:, None] > 0, entry.importance, np.float32(1)) * np.float32(calls)
        pieces += [_packed(name), struct.pack("<ii", calls, values.size), values.astype("<f4").tobytes()]
    chunks = math.ceil(imatrix.chunk_count * imatrix.chunk_size / _CHUNK)
    pieces += [struct.pack("<i", chunks), _packed((imatrix.datasets or ("unknown",))[-1])]
    whole = b"".join(pieces)
    with _appearing(path, overwrite, claim) as partial, partial.open("wb") as handle:
        handle.write(whole + _SUM + struct.pack("<I", zlib.crc32(whole)))


def _of_gguf(header: GgufHeader) -> Imatrix:
    missing = [key for key in ("datasets", "chunk_count", "chunk_size") if f"imatrix.{key}" not in header.fields]
    if missing:
        raise ValueError(f"it has no imatrix.{missing[0]}")
    datasets, count, size = (header.value(f"imatrix.{key}") for key in ("datasets", "chunk_count", "chunk_size"))
    if not (isinstance(datasets, list) and isinstance(count, int) and isinstance(size, int)):
        raise ValueError("the keys imatrix.* have values of other types")
    entries = {}
    for full in header.tensors:  # newer programs may add tensors of other names
        name = full.removesuffix(_SUMS)
        if name == full:
            continue
        if name + _COUNTS not in header.tensors:
            raise ValueError(f"it has no {name}{_COUNTS}")
        sum2, counts = _floats(header, full), _floats(header, name + _COUNTS).reshape(-1)
        entries[name] = ImatrixEntry(sum2.reshape(-1, sum2.shape[-1]), counts)
    if not entries:
        raise ValueError(f"it has no tensor *{_SUMS}")
    found = Imatrix(entries, tuple(datasets), count, size)
    if _SHA256 in header.fields and header.value(_SHA256) != _hash(found):
        raise ValueError("it is not what was written")
    return found


def _hash(imatrix: Imatrix) -> str:
    """SHA-256 (hex) of all that an importance matrix says."""
    said = [imatrix.datasets, imatrix.chunk_count, imatrix.chunk_size]
    digest = sha256(json.dumps(said).encode())
    for name, entry in sorted(imatrix.entries.items()):
        digest.update(json.dumps([name, entry.sum2.shape]).encode())
        digest.update(entry.sum2.astype("<f4").tobytes() + entry.counts.astype("<f4").tobytes())
    return digest.hexdigest()


def _floats(header: GgufHeader, name: str) -> NDArray[np.float32]:
    """A tensor; extents of 1 at the end of ggml's shape are not stored, so it has one dimension or more."""
    tensor = header.tensors[name]
    if tensor.type != "F32" or not tensor.shape:
        raise ValueError(f"tensor {name} is not one of float32")
    return tensor_bytes(header, name).view("<f4").reshape(tensor.shape).copy()


def _of_legacy(data: memoryview) -> Imatrix:
    cursor = Cursor(data, len(data))
    entries: dict[str, ImatrixEntry] = {}
    most = 0
    n_entries = cursor.number("i")
    if not 1 <= n_entries <= len(data) // _LEAST:
        raise ValueError("it begins neither like a GGUF file nor with the number of its entries")
    cursor.charge(_COST * n_entries)
    for _ in range(n_entries):
        name = cursor.text(cursor.number("i"))
        calls, n_values = cursor.number("i"), cursor.number("i")
        if name in entries or not name.isprintable() or calls < 1 or n_values < 1:
            raise ValueError(f"entry {len(entries) + 1}, {name[:80]!r}, is damaged")
        values = np.frombuffer(data, "<f4", n_values, cursor.skip(4 * n_values))
        with np.errstate(over="ignore"):  # to be refused as not finite
            sums = values[None] * np.float32(_CHUNK)
        entries[name] = ImatrixEntry(sums, np.array([calls * _CHUNK], np.float32))
        most = max(most, calls)
    if cursor.position == len(data):
        return Imatrix(entries, (), most, _CHUNK)
    chunks = cursor.number("i")
    dataset = cursor.text(cursor.number("i"))
    whole = cursor.position
    if bytes(data[whole : whole + len(_SUM)]) == _SUM:
        cursor.skip(len(_SUM))
        if cursor.number("I") != zlib.crc32(data[:whole]):
            raise ValueError("it is not what was written")
    if cursor.position != len(data):
        raise ValueError(f"{len(data) - cursor.position:,} bytes follow its end")
    return Imatrix(entries, (dataset,), chunks, _CHUNK)


def _packed(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<i", len(raw)) + raw


@contextmanager
def _appearing(path: Path, overwrite: bool, claim: Claim | None) -> Iterator[Path]:
    """A new file to write to, which is given the name `path` when it is whole."""
    with writing(path), nullcontext(claim) if claim else claimed(path) as held:
        refuse_place(path, overwrite)
        made = held / path.name
        made.create().close()
        yield held.path / path.name
        flush(held.path / path.name)
        os.replace(path.name, path, src_dir_fd=held.fd)
