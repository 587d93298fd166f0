"""Directories held by their descriptors, with files of one's own in them.

Whoever else may write beside them can plant links there, or files of his own. So no link is followed, nothing is
written over that another name leads to as well, and a directory that is moved away meanwhile is still the one written
to.
"""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llmcompress.errors import PlanError, RunError
from llmcompress.store.files import EVERYBODY

_OPENED = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would block for ever
_NOT_ONE = (errno.ENOTDIR, errno.ELOOP)


class Folder:
    """An open directory of this user's own. PlanError for a link, and for one that others own or may all write to."""

    fd = -1

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in _NOT_ONE:
                raise
            raise PlanError(f"{path} is a link or no directory", "remove it, or give another place") from None
        found = os.fstat(self.fd)
        self.owner = found.st_uid
        if found.st_mode & EVERYBODY:
            self.close()
            raise PlanError(f"everybody may write to {path}", f"chmod o-w {path}, or give another place")
        if self.owner != os.geteuid() and self.owner != self._owner_of_new():
            self.close()
            raise PlanError(f"{path} belongs to another user", "remove it, or give another place")

    def _owner_of_new(self) -> int | None:
        """The owner of what this process makes here, whom some network file systems choose; None if it may not."""
        name = f".{secrets.token_hex(8)}"
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPENED, 0o600, dir_fd=self.fd)
        except OSError:
            return None
        os.unlink(name, dir_fd=self.fd)
        try:
            return os.fstat(descriptor).st_uid
        finally:
            os.close(descriptor)

    def __truediv__(self, name: str) -> "HeldFile":
        return HeldFile(self, name)

    def names(self) -> list[str]:
        """Names of all that is in it, sorted."""
        return sorted(os.listdir(self.fd))  # noqa: PTH208 (not by a path)

    def linked(self) -> bool:
        """Whether the directory still has its name."""
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def made(self, name: str) -> "Folder":
        """A new directory in this one."""
        os.mkdir(name, 0o777 & ~EVERYBODY, dir_fd=self.fd)
        return Folder(self.path / name)

    def clear(self, but: str = "") -> None:
        """Delete everything in it, except one name."""
        for name in self.names():
            if name != but:
                try:
                    os.unlink(name, dir_fd=self.fd)
                except (IsADirectoryError, PermissionError):
                    shutil.rmtree(name, dir_fd=self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True)
class HeldFile:
    """A name in a folder, and the file of this user's own that it may lead to."""

    folder: Folder
    name: str

    def __str__(self) -> str:
        return str(self.folder.path / self.name)

    def create(self) -> BinaryIO:
        """A new file open for writing; what had its name is gone."""
        self.unlink()
        return os.fdopen(self.open(os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")

    def open(self, flags: int = os.O_RDONLY) -> int:
        """A descriptor of the file, to be closed; RunError for what this user cannot have written here."""
        try:
            descriptor = os.open(self.name, flags | _OPENED, 0o666 & ~EVERYBODY, dir_fd=self.folder.fd)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise self._planted() from None
        if not self._own(os.fstat(descriptor)):
            os.close(descriptor)
            raise self._planted()
        return descriptor

    def write_whole(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Write the file so that it appears whole or not at all, and survives a power cut."""
        partial = HeldFile(self.folder, f"{self.name}.partial")
        with partial.create() as handle:
            for piece in pieces:
                handle.write(piece)
            handle.flush()
            os.fsync(handle.fileno())
        partial.rename(self.name)

    def read_bytes(self) -> bytes:
        with os.fdopen(self.open(), "rb") as handle:
            return handle.read()

    def exists(self) -> bool:
        """Whether there is such a file; RunError for what this user cannot have written here."""
        try:
            found = self.stat()
        except FileNotFoundError:
            return False
        if not self._own(found):
            raise self._planted()
        return True

    def stat(self) -> os.stat_result:
        return os.stat(self.name, dir_fd=self.folder.fd, follow_symlinks=False)

    def rename(self, name: str) -> "HeldFile":
        """The file under another name in the folder, in place of what had it."""
        os.rename(self.name, name, src_dir_fd=self.folder.fd, dst_dir_fd=self.folder.fd)
        return HeldFile(self.folder, name)

    def unlink(self) -> None:
        """Remove the name, if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(self.name, dir_fd=self.folder.fd)

    def _own(self, found: os.stat_result) -> bool:
        return stat.S_ISREG(found.st_mode) and found.st_uid == self.folder.owner and found.st_nlink <= 1

    def _planted(self) -> RunError:
        return RunError(f"{self} is a link, or not a file of this user alone", "remove it, then run again")
