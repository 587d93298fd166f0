"""Files of tensors that a later start reads: safetensors with checksums of all that is in them, the header included.

Checksums begin with whose the file is and what it is called, so that a file of another run, or under another name, is
not taken for the right one either.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from llmcompress.errors import RunError
from llmcompress.formats.base import TensorSpec
from llmcompress.store.checkpoint import NAMES
from llmcompress.store.files import bytes_of, writing
from llmcompress.store.folder import HeldFile
from llmcompress.store.weight_files import weight_file

_TOKENS = "input_ids"


class CheckedTensors:
    """An open file of tensors. facts: what was written beside them. ValueError for what is not as it was written."""

    def __init__(self, file: Any, seed: int) -> None:
        self._file, self._seed = file, seed
        metadata = file.metadata() or {}
        text = metadata.get("facts", "")
        if metadata.get("crc") != f"{zlib.crc32(text.encode(), seed):08x}":
            raise ValueError("its header is not what was written here")
        self.facts: dict[str, Any] = json.loads(text)
        self._sums: dict[str, int] = self.facts.pop("tensors")
        self.names = list(self._sums)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        if _sum_of(tensor, self._seed) != self._sums[name]:
            raise ValueError(f"{name} is not what was written")
        return tensor


def write_tensors(file: HeldFile, of: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a file that appears whole or not at all. of: whose it is. facts: plain data."""
    seed = _seed(file, of)
    sums = {name: _sum_of(tensor, seed) for name, tensor in tensors.items()}
    text = json.dumps({**facts, "tensors": sums})
    specs = [TensorSpec(name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    made = weight_file(file.name, specs, {"facts": text, "crc": f"{zlib.crc32(text.encode(), seed):08x}"})
    file.write_whole(chain([made.header], (bytes_of(tensors[name]) for name in made.begins)))


@contextmanager
def checked_tensors(file: HeldFile, of: str) -> Iterator[CheckedTensors]:
    """The tensors in a file. ValueError, also while they are read, if it is not what was written there; OSError."""
    descriptor = file.open()
    try:
        with safe_open(f"/dev/fd/{descriptor}", framework="pt") as opened:
            yield CheckedTensors(opened, _seed(file, of))
    except (SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None
    finally:
        os.close(descriptor)


def write_tokens(file: HeldFile, tokens: Tensor) -> None:
    """Write windows of tokens [samples, length], for `read_tokens`."""
    with writing(file):
        write_tensors(file, _TOKENS, {_TOKENS: tokens}, {})


def read_tokens(file: HeldFile) -> Tensor | None:
    """The windows in a file, None if there is none; RunError if it is damaged."""
    if not file.exists():
        return None
    try:
        with checked_tensors(file, _TOKENS) as found:
            return found.read(_TOKENS)
    except (OSError, ValueError) as error:
        raise RunError(f"{file} is damaged: {error}", "remove this file and run again") from None


def _seed(file: HeldFile, of: str) -> int:
    return zlib.crc32(f"{of}/{file.name}".encode())


def _sum_of(tensor: Tensor, seed: int) -> int:
    return zlib.crc32(bytes_of(tensor), zlib.crc32(f"{tensor.dtype}{list(tensor.shape)}".encode(), seed))
