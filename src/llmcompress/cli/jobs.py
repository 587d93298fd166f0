"""What a command asks to be done."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmcompress.cli.stopping import Stop
from llmcompress.ledger import Entry
from llmcompress.recipe import Recipe


@dataclass(frozen=True)
class Job:
    """A recipe with the values of the command's options.

    notes: on how the recipe came about. stop: when to, where work began before the run.
    """

    recipe: Recipe
    values: dict[str, Any]
    notes: Sequence[Entry] = ()
    stop: Stop | None = None
