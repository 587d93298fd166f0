"""Writing files: with the permissions of the umask, but never writable by everybody; a refusal of the system, such as
a full disk, becomes an error that names the file."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from llmcompress.errors import PlanError, RunError

if TYPE_CHECKING:
    from torch import Tensor

EVERYBODY = 0o002  # who may write: this bit of a mode


@contextmanager
def writing(path: object) -> Iterator[None]:
    """RunError if the system or the safetensors library fails to write `path`."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise RunError(f"{path} cannot be written: {reason}", "make room, then run the same command again") from None


def create(path: Path) -> BinaryIO:
    """A new file open for writing; FileExistsError if there is one."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 & ~EVERYBODY), "wb")


def refuse_existing(file: Path, overwrite: bool) -> None:
    """PlanError if `file` exists and may not be replaced, or is not a file."""
    if file.exists() and not overwrite:
        raise PlanError(f"{file} already exists", "give another file, or --overwrite")
    if file.exists() and not file.is_file():
        raise PlanError(f"{file} is not a file, so it is not overwritten", "give another one")


def refuse_unwritable(path: Path) -> None:
    """PlanError if `path` could not be created: no directory above it, one that may not be written to, or the name.

    A directory that is there already has been created before.
    """
    if os.path.isdir(path):  # noqa: PTH112 (pathlib raises for names that are too long)
        return
    missing, above = [path.absolute()], path.absolute().parent
    try:
        while not os.path.lexists(above):
            missing.append(above)
            above = above.parent
        if not above.is_dir():
            raise PlanError(f"{path} cannot be created: {above} is not a directory", "give another directory")
        if not os.access(above, os.W_OK | os.X_OK):
            raise PlanError(f"{path} cannot be created: {above} is not writable", "give another directory")
        if max(len(os.fsencode(part.name)) for part in missing) > os.pathconf(above, "PC_NAME_MAX"):
            raise PlanError(f"{path} cannot be created: a name in it is too long", "give another directory")
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be created: {error}", "give another directory") from None


def make_directory(path: Path) -> None:
    """Make a directory and missing parents; FileExistsError if the directory exists."""
    make_parent(path)
    path.mkdir(0o777 & ~EVERYBODY)


def make_parent(path: Path) -> None:
    """Make the missing parents of `path`."""
    if not path.parent.exists():
        make_directory(path.parent)


def existing(path: Path) -> Path:
    """`path` if it exists, else its nearest existing parent."""
    return next(place for place in (path, *path.resolve().parents) if place.exists())


def json_bytes(value: Any) -> bytes:
    """JSON with an indent of 2 and a newline at the end; keys keep their order."""
    return (json.dumps(value, indent=2) + "\n").encode()


def bytes_of(tensor: "Tensor") -> memoryview:
    """The bytes of a tensor, row by row; not copied if the tensor is contiguous and on the CPU."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
