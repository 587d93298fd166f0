"""Reading tensors of a checkpoint lazily by name; only requested tensors are in memory."""

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from llmcompress.errors import EXIT_FAILED, CheckpointError
from llmcompress.grids.base import Spec
from llmcompress.grids.coded import Coded
from llmcompress.grids.inputs import Rounding
from llmcompress.store.headers import ModelHeaders, Stored, read_headers

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WeightsError(CheckpointError):
    """Weights that prove unusable while they are read, after the run began; finished work is kept."""

    exit_code = EXIT_FAILED


class StoredRows(NamedTuple):
    """The rows of a matrix of this shape [rows, in], as they lie in a file; read: some of them, by their numbers."""

    shape: tuple[int, ...]
    read: Callable[[Sequence[int]], Tensor]


class Checkpoint:
    """A model directory whose tensors are read by name, one at a time."""

    def __init__(self, source: Path | ModelHeaders) -> None:
        self.headers: ModelHeaders = read_headers(source) if isinstance(source, Path) else source
        self.path = self.headers.path

    def __contains__(self, name: str) -> bool:
        return name in self.headers.tensors

    def coded(self, module: str) -> Coded | None:
        """Codes of a module's matrix if the checkpoint stores codes; else None."""
        return None

    def coded_at(self, name: str, number: int) -> Coded | None:
        """Codes of one matrix [out, in] of a tensor [experts, in, out] that is stored as codes; else None."""
        return None

    def code_grid(self, module: str, scales: str | None = None) -> Spec | None:
        """The grid of a module's codes, where the checkpoint tells it and outputs can hold its scales; else None.

        scales: the type of scales in the output, None for that of the model.
        """
        return None

    def stored(self, name: str, kind: str) -> Iterator[memoryview] | None:
        """The bytes of the tensor of a GGUF name, in pieces, if the checkpoint stores type `kind`; else None."""
        return None

    def inputs(self, module: str) -> Rounding | None:
        """The rounding of the inputs of a module's matrix while the model runs; None if inputs are not rounded."""
        return None

    def read(self, name: str) -> Tensor:
        """A tensor in its stored type, in memory of its own; the file is closed again and not mapped."""
        stored = self._place(name)
        value = self._read(stored, (stored.begin, stored.end))
        if stored.cut is None:
            return value.reshape(stored.spec.shape)
        return stored.cut.of(value.reshape(stored.cut.share)).clone(memory_format=torch.contiguous_format)

    def read_at(self, name: str, number: int) -> Tensor:
        """One entry of a tensor along its first dimension, such as the matrix of one expert; nothing else is read."""
        stored = self._place(name)
        count = stored.spec.shape[0]
        if not 0 <= number < count:
            raise CheckpointError(f"tensor {name} has no entry {number}, it has {count}")
        size = (stored.end - stored.begin) // count
        begin = stored.begin + number * size
        return self._read(stored, (begin, begin + size)).reshape(stored.spec.shape[1:])

    def rows(self, name: str) -> StoredRows | None:
        """The rows of a matrix, where one of them can be read without the others; else None."""
        stored = self._place(name)
        if stored.cut is not None or len(stored.spec.shape) != 2:
            return None
        return StoredRows(stored.spec.shape, partial(self._read_rows, stored))

    def _read_rows(self, stored: Stored, numbers: Sequence[int]) -> Tensor:
        """Rows [numbers, in] of a stored matrix; neighbours are read at once. IndexError beyond the last one."""
        count, width = stored.spec.shape
        beyond = [number for number in numbers if not 0 <= number < count]
        if beyond:
            raise IndexError(f"{stored.spec.name} has {count} rows, row {beyond[0]} was asked for")
        size = (stored.end - stored.begin) // max(count, 1)
        spans: list[tuple[int, int]] = []
        for number in numbers:
            begin = stored.begin + size * number
            first = spans.pop()[0] if spans and spans[-1][1] == begin else begin
            spans.append((first, begin + size))
        return self._read(stored, *spans).reshape(len(numbers), width)

    def _place(self, name: str) -> Stored:
        stored = self.headers.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"tensor {name} is missing from {self.path}", "the config does not fit the weights")
        return stored

    def _read(self, stored: Stored, *spans: tuple[int, int]) -> Tensor:
        """Some bytes of a file's data, from begin to end of each span, as a tensor of the stored type, flat."""
        name = stored.spec.name
        # read into the tensor's memory: a mapped file would be copied and counted as further memory
        data = torch.empty(sum(end - begin for begin, end in spans), dtype=torch.uint8)
        try:
            with stored.file.open("rb", buffering=0) as file:
                start = 8 + struct.unpack("<Q", file.read(8))[0]
                free = data.numpy().data
                for begin, end in spans:
                    file.seek(start + begin)
                    rest, free = free[: end - begin], free[end - begin :]
                    while rest:
                        count = file.readinto(rest)  # at most 2 GiB at a time on Linux
                        if not count:
                            raise WeightsError(f"{stored.file} ends within tensor {name}", "fetch the file again")
                        rest = rest[count:]
        except (OSError, OverflowError, struct.error) as error:
            raise WeightsError(
                f"{stored.file} cannot be read at tensor {name}: {error}", "fetch the file again"
            ) from None
        return data.view(DTYPES[stored.spec.dtype])

    def expect(self, names: Iterable[str]) -> None:
        """Ask the system to prefetch these tensors into its page cache."""
        for name in names:
            stored = self.headers.tensors.get(name)
            if stored is not None and hasattr(os, "posix_fadvise"):
                with suppress(OSError), stored.file.open("rb", buffering=0) as file:
                    start = 8 + int.from_bytes(file.read(8), "little") + stored.begin
                    os.posix_fadvise(file.fileno(), start, stored.end - stored.begin, os.POSIX_FADV_WILLNEED)

    def read_finite(self, name: str, device: torch.device | None = None) -> Tensor:
        """`read` to a device; WeightsError for weights that are not finite."""
        tensor = self.read(name)
        tensor = tensor if device is None else tensor.to(device)
        if tensor.is_floating_point() and tensor.numel():
            # minimum and maximum propagate nan and inf and, unlike isfinite, need no second tensor
            low, high = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
            if not bool(torch.isfinite(low) & torch.isfinite(high)):
                file = self.headers.tensors[name].file
                raise WeightsError(f"{file}: tensor {name} holds values that are not finite")
        return tensor

    def names(self) -> Iterable[str]:
        return self.headers.tensors.keys()
