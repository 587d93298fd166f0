"""Plain text: one file, or a folder read recursively, one document per file."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from llmcompress.calib.base import Source, TokenRequest, windows
from llmcompress.calib.dataset import is_saved
from llmcompress.calib.documents import Document, token_ids
from llmcompress.errors import CalibrationError

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".txt", ".md")
_MOST_FILES = 100_000  # a mistaken "/" would be walked for minutes


class Text(Source):
    """Text of a file, or of all .txt and .md files below a folder, in the order of their paths."""

    name = "text"
    accepts = "a .txt or .md file, or a folder of them"

    path: Path = Field(description="text file, or folder of .txt and .md files")

    @classmethod
    def detects(cls, path: Path) -> bool:
        return (path.is_dir() and not is_saved(path)) or (path.is_file() and path.suffix.lower() in SUFFIXES)

    def tokens(self, request: TokenRequest) -> "Tensor":
        files = text_files(self.path) if self.path.is_dir() else [self.path]
        documents = (Document(str(file), file) for file in files)
        return windows(token_ids(request.tokenizer, documents, f"{self.path}"), request, f"{self.path}")


def text_files(folder: Path, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """Files below `folder` that end in one of `suffixes`, ordered by path; hidden files and folders are left out."""
    found = {}
    seen = 0
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "."]
        seen += len(folders) + len(files)
        if seen > _MOST_FILES:
            raise CalibrationError(
                f"{folder} holds more than {_MOST_FILES:,} files and folders",
                "give a folder that holds the texts alone",
            )
        for path in (Path(place, name) for name in files if name[0] != "."):
            if path.suffix.lower() in suffixes and path.is_file():
                # parts, not Path: Windows compares paths without regard to case
                found[path.relative_to(folder).parts] = path
    if not found:
        raise CalibrationError(
            f"no {' or '.join(suffixes)} file in {folder} or below", "give a folder of texts, or a single file"
        )
    return [found[parts] for parts in sorted(found)]


SOURCE = Text
