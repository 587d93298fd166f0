"""GGUF files before they are written: their headers, made by the gguf package, and so their exact sizes."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmcompress.formats.base import TensorSpec
from llmcompress.formats.gguf.tensors import GGUFTensor
from llmcompress.formats.gguf.types import TensorType

if TYPE_CHECKING:
    from gguf import GGUFWriter

ALIGNMENT = 32
ENCODED_AT_ONCE = 1 << 22  # weights: memory does not depend on the vocabulary


@dataclass(frozen=True)
class Placed:
    """A tensor of a file and the type its values are stored in."""

    tensor: GGUFTensor
    type: TensorType

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.tensor.name, self.type.name, self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return self.type.nbytes(self.tensor.shape)


@dataclass(frozen=True)
class GgufFile:
    """One file. header: all that comes before the data, which begin aligned. Tensors follow, each padded."""

    name: str
    header: bytes
    tensors: tuple[Placed, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(padded(placed.nbytes) for placed in self.tensors)


def padded(size: int) -> int:
    """Bytes that `size` bytes take in a file."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def gguf_files(
    stem: str,
    arch: str,
    tensors: Sequence[Placed],
    describe: "Callable[[GGUFWriter], None]",
    max_bytes: int | None = None,
) -> tuple[GgufFile, ...]:
    """The files for `tensors`: one, or several of at most `max_bytes` of data each, as llama.cpp names and reads them.

    describe: adds the metadata, all of which stand in the first file.
    """
    from gguf import GGUFWriter

    parts: list[list[Placed]] = [[]]
    filled = 0
    for placed in tensors:
        size = padded(placed.nbytes)
        if max_bytes is not None and parts[-1] and filled + size > max_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(placed)
        filled += size
    found = []
    for number, part in enumerate(parts):
        writer = GGUFWriter(None, arch)
        if number == 0:
            describe(writer)
        else:
            writer.kv_data[0].clear()
        if len(parts) > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", len(parts))
            writer.add_int32("split.tensors.count", len(tensors))
        name = f"{stem}.gguf" if len(parts) == 1 else f"{stem}-{number + 1:05d}-of-{len(parts):05d}.gguf"
        found.append(GgufFile(name, _header(writer, part), tuple(part)))
    return tuple(found)


def _header(writer: "GGUFWriter", tensors: Sequence[Placed]) -> bytes:
    """What the package writes before the data."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.gguf_writer import WriterState

    for placed in tensors:
        kind, shape = placed.type, placed.tensor.shape
        if kind.quantised or kind.name == "BF16":  # the package wants the bytes' shape and gives back the values'
            width = kind.nbytes((1, shape[-1]))
            raw = GGMLQuantizationType(kind.id)
            writer.add_tensor_info(placed.tensor.name, (*shape[:-1], width), np.dtype(np.uint8), placed.nbytes, raw)
        else:
            dtype = np.dtype(np.float32 if kind.name == "F32" else np.float16)
            writer.add_tensor_info(placed.tensor.name, shape, dtype, placed.nbytes)
    out = io.BytesIO()
    writer.fout, writer.state = [out], WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    header = out.getvalue()
    return header + bytes(padded(len(header)) - len(header))
