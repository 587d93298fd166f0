"""Compiled kernels on disk, each in a file named by the hash of everything the kernel was made from.

A file is a line of JSON, with the kernel's description and the hash of the cubin, then the cubin. A file that does not
match its description is ignored, and its kernel compiled again.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from llmcompress.errors import PlanError
from llmcompress.kernels.compilers import Defines

VARIABLE = "LLMCOMPRESS_KERNEL_CACHE"
_FORMAT = 1  # raised when the layout of files or the options of compilers change
_SUFFIX = ".cubin"
_BUILD = rf"[0-9a-f]{{64}}{re.escape(_SUFFIX)}"  # names of the cache's own files
_LEFT = r"[0-9a-f]{64}\w+\.partial"  # of those that a process was killed at


@dataclass(frozen=True)
class Made:
    """The inputs of a cubin's compilation. source_sha256: of the text with everything it includes."""

    source: str
    source_sha256: str
    defines: Defines
    architecture: str
    compiler: str

    @property
    def key(self) -> str:
        """Hash of all of it."""
        return sha256(json.dumps([_FORMAT, asdict(self)]).encode()).hexdigest()


@dataclass(frozen=True)
class CachedBuild:
    """A file of the cache. about: the file's description; None for a damaged file."""

    file: Path
    bytes: int
    about: dict[str, Any] | None


def directory_of(given: Path | None = None) -> Path:
    """`given`, else what the environment says, else llmcompress/kernels below the user's cache directory."""
    if given is not None:
        return given
    if stated := os.environ.get(VARIABLE):
        return Path(stated)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "llmcompress" / "kernels"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"llmcompress-{os.getuid()}" / "kernels"


class Cache:
    """The cubins in a directory, which is made when the first is written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, made: Made) -> bytes | None:
        """A cubin, None if there is none or a damaged one."""
        found = _read(self._file(made))
        return None if found is None else found[1]

    def write(self, made: Made, cubin: bytes) -> None:
        """Write a cubin whole or not at all, even if other processes write the same one. OSError if writing fails."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = {"format": _FORMAT, **asdict(made), "sha256": sha256(cubin).hexdigest()}
        handle, partial = tempfile.mkstemp(prefix=made.key, suffix=".partial", dir=self.directory)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(about).encode() + b"\n" + cubin)
            Path(partial).replace(self._file(made))
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise

    def entries(self) -> Iterator[CachedBuild]:
        """All files of the cache, by name."""
        for file, size in self._files(_BUILD):
            found = _read(file)
            yield CachedBuild(file, size, None if found is None else found[0])

    def clear(self) -> tuple[int, int]:
        """Remove all files of the cache, and what was left half-written; how many, and their bytes.

        PlanError for one that stays.
        """
        count = total = 0
        for file, size in self._files(f"(?:{_BUILD}|{_LEFT})"):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise PlanError(f"{file} cannot be removed: {error.strerror}") from None
            count, total = count + 1, total + size
        return count, total

    def _file(self, made: Made) -> Path:
        return self.directory / f"{made.key}{_SUFFIX}"

    def _files(self, names: str) -> Iterator[tuple[Path, int]]:
        """Files whose names fit a pattern, by name, and their bytes; one that is removed meanwhile is left out."""
        for file in sorted(self.directory.glob("*")) if self.directory.is_dir() else ():
            if re.fullmatch(names, file.name) and file.is_file():
                with suppress(FileNotFoundError):
                    yield file, file.stat().st_size


def _read(file: Path) -> tuple[dict[str, Any], bytes] | None:
    """A file's description and cubin; None if there is no file, or its cubin does not match the description."""
    try:
        line, _, cubin = file.read_bytes().partition(b"\n")
        about = json.loads(line)
    except (OSError, ValueError):
        return None
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        return None
    if about.get("sha256") != sha256(cubin).hexdigest():
        return None
    return about, cubin
