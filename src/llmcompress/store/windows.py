"""Tensors of all calibration windows in a file, with a few windows at a time in memory."""

import os
import zlib
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from llmcompress.background import Behind
from llmcompress.errors import RunError
from llmcompress.store.files import bytes_of, writing
from llmcompress.store.folder import HeldFile
from llmcompress.workers import Part

_WAITING = 2  # batches from a GPU that may wait for writing


class Windows:
    """A tensor [samples, ...] in a file, read by slices of samples; any number of threads may read."""

    def __init__(self, file: HeldFile, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.file, self.shape, self.dtype = file, shape, dtype
        self._sample = torch.Size(shape[1:]).numel() * dtype.itemsize
        self.nbytes = shape[0] * self._sample

    def read(self, span: slice, pinned: bool = False) -> Tensor:
        """Samples [span] as a tensor of its own memory. pinned: in memory that a GPU copies from by itself."""
        out = torch.empty(span.stop - span.start, *self.shape[1:], dtype=self.dtype, pin_memory=pinned)
        rest = bytes_of(out)
        place = span.start * self._sample
        descriptor = self.file.open()
        try:
            while rest:
                count = os.preadv(descriptor, [rest], place)
                if not count:
                    raise RunError(f"{self.file} is truncated", "run the same command again")
                rest, place = rest[count:], place + count
        finally:
            os.close(descriptor)
        return out

    def crc(self, seed: int) -> int | None:
        """CRC-32 of the bytes in the file, begun with `seed`; None if there are more or fewer than there should be."""
        with os.fdopen(self.file.open(), "rb") as handle:
            if os.fstat(handle.fileno()).st_size != self.nbytes:
                return None
            while chunk := handle.read(1 << 24):
                seed = zlib.crc32(chunk, seed)
        return seed


class WindowsShare(Windows):
    """Every n-th batch of windows, from that of a part on. shape and slices (within a batch) are those of the share."""

    def __init__(self, whole: Windows, batch: int, part: Part) -> None:
        self.batch, self.part = batch, part
        count = whole.shape[0]
        starts = range(part.number * batch, count, part.of * batch)
        mine = sum(min(batch, count - start) for start in starts)
        super().__init__(whole.file, (mine, *whole.shape[1:]), whole.dtype)

    def read(self, span: slice, pinned: bool = False) -> Tensor:
        before = (span.start // self.batch * (self.part.of - 1) + self.part.number) * self.batch  # of other parts
        return super().read(slice(span.start + before, span.stop + before), pinned)


class WindowsWriter:
    """Writes windows batch by batch into `file`.

    An existing file is overwritten in place: its pages are in memory, which is many times faster than asking the file
    system for new pages. seed: what the CRC-32 of the bytes is begun with, which `crc` is after `finish`; None for
    none. Threads write batches from a GPU while the GPU continues.
    """

    def __init__(self, file: HeldFile, dtype: torch.dtype, seed: int | None = None) -> None:
        self.file, self.dtype, self.crc = file, dtype, seed
        self._shape: tuple[int, ...] = (0,)
        with writing(file):
            if not file.exists():
                file.create().close()
            self._handle = os.fdopen(file.open(os.O_RDWR), "r+b", buffering=0)
        self._writing: tuple[Behind, Behind] | None = None

    def append(self, batch: Tensor) -> None:
        """Add samples [n, ...]."""
        self._shape = (self._shape[0] + batch.shape[0], *batch.shape[1:])
        if batch.is_cuda:
            self._append_behind(batch.detach())
            return
        rest = bytes_of(batch.detach().to(self.dtype))
        self._sum(rest)
        self._write(rest)

    def _append_behind(self, batch: Tensor) -> None:
        """Copy a batch from the GPU through pinned memory, then sum and write it, while others are computed."""
        host = torch.empty(batch.shape, dtype=self.dtype, pin_memory=True)
        host.copy_(batch, non_blocking=True)
        copied = torch.cuda.current_stream(batch.device).record_event()
        self._writing = self._writing or (Behind(_WAITING), Behind(_WAITING))

        def do(what: Callable[[memoryview], None]) -> None:
            copied.synchronize()
            what(bytes_of(host))

        for behind, what in zip(self._writing, (self._sum, self._write), strict=True):
            behind.add(partial(do, what))

    def _sum(self, rest: memoryview) -> None:
        if self.crc is not None:
            self.crc = zlib.crc32(rest, self.crc)

    def _write(self, rest: memoryview) -> None:
        with writing(self.file):
            while rest:
                rest = rest[self._handle.write(rest) :]

    def _wait(self) -> None:
        for behind in self._writing or ():
            behind.finish()
        self._writing = None

    def finish(self, name: Callable[[int | None], str] = lambda crc: "") -> Windows:
        """The written windows, in a file of the name that `name` makes of their CRC-32, if it makes one."""
        self._wait()
        self._handle.truncate()
        self._handle.close()
        named = name(self.crc)
        return Windows(self.file.rename(named) if named else self.file, self._shape, self.dtype)

    def abandon(self) -> None:
        """Stop writing."""
        self._wait()
        self._handle.close()


def write_windows(batches: Iterable[Tensor], file: HeldFile, dtype: torch.dtype) -> Windows:
    """All batches [n, ...] in `file`, in `dtype`; RunError if the system refuses it."""
    writer = WindowsWriter(file, dtype)
    for batch in batches:
        writer.append(batch)
    return writer.finish()
