"""The name of the model and the number of the shard, from the name of a GGUF file."""

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
    """The shard that a file's name declares; None for a file of a whole model."""
    named = _SHARD.fullmatch(file.name)
    return None if named is None else SplitFile(named[1], int(named[2]), int(named[3]))


def stem_of(file: Path) -> str:
    """The name of a file's model: that of the file or of the link to the file."""
    shard = shard_of(file)
    return file.stem if shard is None else shard.stem
