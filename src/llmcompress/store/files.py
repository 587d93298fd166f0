"""Files as they are written here: with the permissions of the umask, but never for everybody to change, and with the
system's refusals, such as a full disk, as errors that name the file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from llmcompress.errors import PlanError, RunError

if TYPE_CHECKING:
    from torch import Tensor

_EVERYBODY = 0o002


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """RunError for what the system, or the safetensors library in its name, refuses while `path` is written."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise RunError(f"{path} cannot be written: {reason}", "make room, then run the same command again") from None


def file_mode() -> int:
    """What a new file gets. For files that a library made, some of which it keeps to their owner."""
    umask = os.umask(0o077)  # the only way to ask for it
    os.umask(umask)
    return 0o666 & ~umask & ~_EVERYBODY


def create(path: Path) -> BinaryIO:
    """A new file open for writing; FileExistsError if there is one."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 & ~_EVERYBODY), "wb")


def write_whole(file: Path, content: bytes, overwrite: bool) -> None:
    """A file that appears whole or not at all; as `refuse_existing`, and RunError if the system refuses it."""
    refuse_existing(file, overwrite)
    partial = file.with_name(f"{file.name}.partial")
    with writing(file):
        make_parent(file)
        partial.unlink(missing_ok=True)
        with create(partial) as handle:
            handle.write(content)
        partial.replace(file)


def refuse_existing(file: Path, overwrite: bool) -> None:
    """PlanError for a file that is there, and is not to be replaced or is none."""
    if file.exists() and not overwrite:
        raise PlanError(f"{file} already exists", "give another file, or --overwrite")
    if file.exists() and not file.is_file():
        raise PlanError(f"{file} is not a file, so it is not overwritten", "give another one")


def make_directory(path: Path) -> None:
    """A new directory, and those above it that are missing; FileExistsError if there is one."""
    make_parent(path)
    path.mkdir(0o777 & ~_EVERYBODY)


def make_parent(path: Path) -> None:
    """The directory that `path` lies in, and those above it, as far as they are missing."""
    if not path.parent.exists():
        make_directory(path.parent)


def existing(path: Path) -> Path:
    """A path if it is there, else the nearest directory above it that is."""
    return next(place for place in (path, *path.resolve().parents) if place.exists())


def bytes_of(tensor: "Tensor") -> memoryview:
    """The bytes of a tensor, row by row: its own memory, not a copy, where it is contiguous and not on a device."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
