"""What the name of a GGUF file says: what its model is called, and which shard of it the file is."""

import re
from dataclasses import dataclass
from pathlib import Path

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class SplitFile:
    """One of `count` files of a model; number: from 1."""

    stem: str
    number: int
    count: int


def shard_of(file: Path) -> SplitFile | None:
    """Which shard a file is by its name; None for one that holds a whole model."""
    named = _SHARD.fullmatch(file.name)
    return None if named is None else SplitFile(named[1], int(named[2]), int(named[3]))


def stem_of(file: Path) -> str:
    """What the model in a file is called: as the file, or the link to it, that was named."""
    shard = shard_of(file)
    return file.stem if shard is None else shard.stem
