"""Formats that others write and that are read alone: sources of runs, never their outputs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmcompress.formats.base import Config, Entry, Format, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded


class ReadOnlyFormat(Format):
    """A format that no plan writes; a subclass says how its checkpoints are recognised and decoded."""

    writes = False
    holds = ()

    def refuses(self, entries: Sequence[Entry], config: Config) -> tuple[str, str] | None:
        return f"format {self.name} is read and not written", "use --format compressed-tensors"

    def layout(self, entry: Entry) -> list[TensorSpec]:
        raise TypeError(f"format {self.name} is not written")

    def encode(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        raise TypeError(f"format {self.name} is not written")

    def config(self, entries: Sequence[Entry], config: Config) -> dict[str, dict[str, Any]]:
        raise TypeError(f"format {self.name} is not written")
