"""Tensors of all calibration windows in a file, of which a few windows at a time are in memory."""

import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from llmcompress.errors import RunError
from llmcompress.processes import Part
from llmcompress.store.files import bytes_of, create, writing


class Windows:
    """A tensor [samples, ...] in a file, read by slices of samples; any number of threads may read."""

    def __init__(self, file: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.file, self.shape, self.dtype = file, shape, dtype
        self._sample = torch.Size(shape[1:]).numel() * dtype.itemsize
        self.nbytes = shape[0] * self._sample

    def read(self, span: slice) -> Tensor:
        """Samples [span] as a tensor of its own memory."""
        out = torch.empty(span.stop - span.start, *self.shape[1:], dtype=self.dtype)
        rest = bytes_of(out)
        place = span.start * self._sample
        with self.file.open("rb", buffering=0) as handle:
            while rest:
                count = os.preadv(handle.fileno(), [rest], place)
                if not count:
                    raise RunError(f"{self.file} is truncated", "run the same command again")
                rest, place = rest[count:], place + count
        return out


class WindowsShare(Windows):
    """Every n-th batch of windows, from that of a part on. shape and slices (within a batch) are those of the share."""

    def __init__(self, whole: Windows, batch: int, part: Part) -> None:
        self.batch, self.part = batch, part
        count = whole.shape[0]
        starts = range(part.number * batch, count, part.of * batch)
        mine = sum(min(batch, count - start) for start in starts)
        super().__init__(whole.file, (mine, *whole.shape[1:]), whole.dtype)

    def read(self, span: slice) -> Tensor:
        before = (span.start // self.batch * (self.part.of - 1) + self.part.number) * self.batch  # of other parts
        return super().read(slice(span.start + before, span.stop + before))


class WindowsWriter:
    """Writes windows batch by batch into `file`.

    A file that is there already is written over: its pages are in memory, which is many times faster than to ask the
    file system for new ones. crc: CRC-32 of what was written, where `checked` asks for it.
    """

    def __init__(self, file: Path, dtype: torch.dtype, checked: bool = False) -> None:
        self.file, self.dtype, self.checked = file, dtype, checked
        self.crc = 0
        self._shape: tuple[int, ...] = (0,)
        with writing(file):
            if not file.exists():
                create(file).close()
            self._handle = file.open("r+b", buffering=0)

    def append(self, batch: Tensor) -> None:
        """Add samples [n, ...]."""
        flat = batch.detach().to("cpu", self.dtype).contiguous()
        self._shape = (self._shape[0] + flat.shape[0], *flat.shape[1:])
        rest = bytes_of(flat)
        if self.checked:
            self.crc = zlib.crc32(rest, self.crc)
        with writing(self.file):
            while rest:
                rest = rest[self._handle.write(rest) :]

    def finish(self, name: Path | None = None) -> Windows:
        """What was written, under the file's final name if it has another."""
        self._handle.truncate()
        self._handle.close()
        if name is not None:
            self.file.replace(name)
        return Windows(name or self.file, self._shape, self.dtype)

    def abandon(self) -> None:
        """Write no more."""
        self._handle.close()


def write_windows(batches: Iterable[Tensor], file: Path, dtype: torch.dtype) -> Windows:
    """All batches [n, ...] in `file`, in `dtype`; RunError if the system refuses it."""
    writer = WindowsWriter(file, dtype)
    for batch in batches:
        writer.append(batch)
    return writer.finish()
