"""The claim of one run on a directory, for as long as its process lives.

A file in the directory, its mark, is locked; a process that has gone holds no lock, so what it left may be claimed
again. Where a file system knows no locks, the mark is the claim itself, and goes to a later run of the same machine if
its process has gone.
"""

import errno
import fcntl
import os
import platform
import secrets
from contextlib import suppress
from pathlib import Path

from llmcompress.errors import PlanError, RunError
from llmcompress.store.files import EVERYBODY, make_parent, writing
from llmcompress.store.folder import Folder

_HELD = (errno.EWOULDBLOCK, errno.EACCES)


class ClaimedError(PlanError):
    """Another run holds what this one wants."""


class Claim(Folder):
    """A directory that is made if need be and that this process holds alone, until `close`.

    ClaimedError, which names the holder, if another run holds it; PlanError for a directory with other things in it but
    no mark; RunError if the system does not let it be made.
    """

    def __init__(self, path: Path, mark: str, busy: str, hint: str) -> None:
        """busy, hint: what to say where another run holds it."""
        self.mark, self._lock, self._locked = mark, -1, False
        self._busy, self._hint = busy, hint
        self._made = [parent for parent in path.parents if not parent.exists()]
        with writing(path):
            make_parent(path)
            while not self._taken(path):  # the last holder gives it up at this moment
                self.close()

    def _taken(self, path: Path) -> bool:
        with suppress(FileExistsError):
            path.mkdir(0o777 & ~EVERYBODY)
        try:
            super().__init__(path)
            refuse_other(self, self.mark)
            return self._held()
        except FileNotFoundError:
            return False

    def _held(self) -> bool:
        """Whether the mark is locked now; False if mark or directory went away meanwhile."""
        mark, new = self / self.mark, True
        try:
            self._lock = mark.open(os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            try:
                self._lock, new = mark.open(os.O_RDWR), False
            except RunError as error:
                raise PlanError(error.message, error.hint) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._locked = True
        except OSError as error:
            if error.errno in _HELD or not (new or self._inherited()):
                raise self._refusal() from None
        if not self.linked() or not os.path.samestat(os.fstat(self._lock), mark.stat()):
            return False
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()} {platform.node()} {secrets.token_hex(8)}\n".encode(), 0)
        except OSError:  # such as a full disk
            if new:
                self.remove()
            raise
        return True

    def _inherited(self) -> bool:
        """Whether a claim without a lock has lost its process, and passes to this one and to no other."""
        said = self._said()
        if len(said) != 3 or said[1] != platform.node() or _lives(int(said[0])):
            return False
        heir = self / f"{self.mark}.{said[2]}"
        try:
            os.close(heir.open(os.O_RDWR | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        if self._said() != said:
            heir.unlink()
            return False
        return True

    def _said(self) -> list[str]:
        """Process, machine and token of the holder; nothing where it has not written them yet."""
        words = os.pread(self._lock, 1000, 0).decode(errors="replace").split()
        return words if len(words) == 3 and words[0].isdecimal() else []

    def _refusal(self) -> ClaimedError:
        said = self._said()
        who = f" (process {said[0]} on {said[1]})" if said else ""
        return ClaimedError(f"{self._busy} another run{who}", self._hint)

    def remove(self) -> None:
        """Delete the directory and give it up; the mark last, which tells whose the other files are."""
        self.clear(but=self.mark)
        (self / self.mark).unlink()
        with suppress(OSError):  # it is the next run's already, or a directory above it has something in it
            for directory in (self.path, *self._made):
                directory.rmdir()
        self.close()

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def close(self) -> None:
        if self._lock >= 0:
            if self._locked:  # what stays says nothing of process and machine
                with suppress(OSError):
                    os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock, self._locked = -1, False
        super().close()


def refuse_other(folder: Folder, mark: str) -> None:
    """PlanError for a directory that holds something, but no mark of this tool."""
    for _ in range(2):  # a run that ends meanwhile takes its mark away last
        names = folder.names()
        if not names or mark in names or not folder.linked():
            return
    raise PlanError(f"{folder.path} is in the way and was not made by a run of this tool", "move it away")


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
