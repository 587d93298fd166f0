"""Parts of facts about any runtime: what finds matrices and caches, and what is true of several runtimes."""

from collections.abc import Callable

from llmcompress.engine.targets.grid_facts import BitWidths
from llmcompress.formats.base import Entry
from llmcompress.formats.kv_cache import OPTION
from llmcompress.formats.schemes import INTEGERS, kind

AWQ_BITS = BitWidths((4,), why="awq has 4 bits")
SOME_TYPES = "it does not run some types of models"
FROM_ORIGINAL = "start from the original, whose experts lie in one tensor"


def matrices(*types: str, rounded: bool | None = None) -> Callable[[Entry], bool]:
    """Finds quantised matrices of these types, or all of them; with rounded inputs, or without, or both."""
    return lambda entry: (
        entry.grid is not None
        and (not types or entry.grid.type in types)
        and rounded in (None, entry.inputs is not None)
    )


def integers(entry: Entry) -> bool:
    """Whether a matrix is of int8 in bytes of their own, for products with int8 inputs."""
    return entry.grid is not None and entry.inputs is not None and kind(entry.grid, entry.inputs) == INTEGERS


def caches(code: str) -> Callable[[Entry], bool]:
    """Finds scales of keys and values that are cached in this code."""
    return lambda entry: entry.options.get(OPTION) == code
