"""Reading forward through an untrusted binary file: every count and length is checked before it is used."""

import mmap
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any

from llmcompress.errors import CheckpointError

_FACTOR, _ALLOWANCE = 4, 1 << 19  # memory that reading may allocate: a multiple of the file's size, plus bytes
_PER_BYTE_OF_TEXT = 6  # the bytes, and their str, in which one wide character widens all
_struct = cache(lambda code: struct.Struct(f"<{code}"))


def mapped(path: Path) -> memoryview:
    """The bytes of a file, mapped read-only; CheckpointError if there is no such file."""
    try:
        if path.exists() and not path.is_file():  # a pipe would block for ever
            raise CheckpointError(f"{path} is not a file")
        with path.open("rb") as handle:
            if os.fstat(handle.fileno()).st_size == 0:  # an empty file cannot be mapped
                return memoryview(b"")
            return memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte in it
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} cannot be read: {reason}") from None


class Cursor:
    """A place in `data` that moves forward only and not beyond byte `limit`. Little-endian.

    Every method raises ValueError that names the fault before it allocates memory.
    """

    def __init__(self, data: memoryview, limit: int) -> None:
        self.position = 0
        self.limit = min(limit, len(data))
        self._data = data
        self._left = _FACTOR * len(data) + _ALLOWANCE

    def skip(self, nbytes: int) -> int:
        """Move on by `nbytes`; returns their first position."""
        begin = self.position
        if not 0 <= nbytes <= self.limit - begin:
            raise ValueError(f"the {nbytes:,} bytes announced at byte {begin:,} pass the end at byte {self.limit:,}")
        self.position += nbytes
        return begin

    def number(self, code: str) -> Any:
        """One number of the `struct` format letter `code`."""
        number = _struct(code)
        return number.unpack_from(self._data, self.skip(number.size))[0]

    def text(self, nbytes: int) -> str:
        """UTF-8 of a known length, to be kept."""
        begin = self.skip(nbytes)
        self.charge(_PER_BYTE_OF_TEXT * nbytes)
        return self._decoded(begin)

    def texts(self, count: int) -> list[str]:
        """`count` texts, each after its u64 length. Not charged: a caller who asks for a vocabulary gets all of it."""
        return [self._decoded(self.skip(self.number("Q"))) for _ in range(count)]

    def skip_texts(self, count: int) -> int:
        """Move on by `count` texts, each after its u64 length; returns their first position."""
        begin = at = self.position
        length = _struct("Q")
        for _ in range(count):
            if at + length.size > self.limit:
                raise ValueError(f"the {count:,} texts at byte {begin:,} pass the end at byte {self.limit:,}")
            at += length.size + length.unpack_from(self._data, at)[0]
        return self.skip(at - begin)

    def charge(self, nbytes: int) -> None:
        """Count bytes that a reader will keep; refuses many times the file's size, as for a million empty names."""
        self._left -= nbytes
        if self._left < 0:
            raise ValueError("it would take many times its size")

    def _decoded(self, begin: int) -> str:
        try:
            return bytes(self._data[begin : self.position]).decode()
        except UnicodeDecodeError:
            raise ValueError(f"the text at byte {begin:,} is not UTF-8") from None
