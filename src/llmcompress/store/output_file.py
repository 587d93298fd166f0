"""A single GGUF file that appears whole or not at all, with its report beside it."""

import os
from pathlib import Path
from typing import Any

from llmcompress.errors import ExistsError, PlanError
from llmcompress.store.output import OutputDirectory, flush

_MAGIC = b"GGUF"
BESIDE = ("report.json", "transforms.npz", "Modelfile")  # written beside a single file as NAME.<this name>
SINGLE_FILE = "model.gguf"  # what its own report calls a single file, whose name its owner may change


class OutputFile(OutputDirectory):
    """An output directory of which only the GGUF file named like `path` and the files of BESIDE appear."""

    def _appear(self) -> Path:
        moves = {self.partial / name: beside(self.path, name) for name in BESIDE if (self.partial / name).exists()}
        moves[self.partial / self.path.name] = self.path  # last: a report alone misleads nobody
        for made in moves:
            flush(made)
        for name in BESIDE:
            beside(self.path, name).unlink(missing_ok=True)
        if os.path.lexists(self.path):  # a new report beside the old file would mislead, as the old one beside the new
            moves = dict(reversed(moves.items()))
        for made, place in moves.items():
            made.replace(place)
        flush(self.path.parent)
        return self.path

    def _recorded(self) -> dict[str, dict[str, Any]]:
        appearing = {name: self.files[name] for name in BESIDE if name in self.files}
        return {SINGLE_FILE: self.files[self.path.name], **appearing}

    def _refuse_existing(self) -> None:
        for file in (beside(self.path, name) for name in BESIDE):
            if os.path.lexists(file) and (file.is_symlink() or not file.is_file()):
                raise PlanError(f"{file} is in the way and is not a file", "move it away")
        if not os.path.lexists(self.path):
            return
        if not self.overwrite:
            raise ExistsError(f"{self.path} already exists", "give another file, or --overwrite")
        if self.path.is_symlink() or not self.path.is_file():
            raise PlanError(f"{self.path} is not a file, so it is not overwritten", "give another one")
        with self.path.open("rb") as handle:
            if handle.read(len(_MAGIC)) != _MAGIC:
                raise PlanError(f"{self.path} is not a GGUF file, so it is not overwritten", "give another one")


def is_single(path: Path) -> bool:
    """Whether an output is one GGUF file, not a directory."""
    return path.suffix == ".gguf"


def output_of(path: Path, format_: str, overwrite: bool) -> OutputDirectory:
    """The output to be written at `path` in a format of that name."""
    if is_single(path) and format_ != "gguf":
        raise PlanError(f"{path} is called like a GGUF file, format {format_} is a directory", "give another --output")
    return (OutputFile if is_single(path) else OutputDirectory)(path, overwrite=overwrite)


def in_output(path: Path) -> bool:
    """Whether a GGUF file has its report in the directory that it lies in, which then is an output."""
    return path.with_name("report.json").exists() and not report_of(path).exists()


def report_of(path: Path) -> Path:
    """The path of a single file's report."""
    return beside(path, "report.json")


def beside(path: Path, name: str) -> Path:
    """The path of a file of BESIDE that belongs to the single file `path`."""
    return path.with_name(f"{path.name}.{name}")
