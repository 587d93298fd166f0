"""Headers and indexes of safetensors files, known before the first tensor from the specs of tensors alone."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmcompress.errors import RunError
from llmcompress.formats.base import ITEM_SIZE, TensorSpec
from llmcompress.store.files import json_bytes

SHARD_BYTES = 5_000_000_000
_FORMAT = {"format": "pt"}


@dataclass(frozen=True)
class WeightFile:
    """One weight file: its name, the raw header, and where in the file each tensor begins, in the file's order."""

    name: str
    header: bytes
    begins: Mapping[str, int]
    nbytes: int


def weight_file(name: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str] = _FORMAT) -> WeightFile:
    """The file of `specs`. Wide items come first: each then begins at a multiple of its size, as readers in place need.

    The same specs and metadata give the same bytes, which the library of the format does not promise.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offsets: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: -ITEM_SIZE[spec.dtype]):
        offsets[spec.name] = end
        end += spec.nbytes
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offsets[spec.name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw = struct.pack("<Q", len(text)) + text
    return WeightFile(name, raw, {tensor: len(raw) + begin for tensor, begin in offsets.items()}, len(raw) + end)


def shards(specs: Sequence[TensorSpec], shard_bytes: int | None = None, stem: str = "model") -> list[WeightFile]:
    """The weight files for `specs`, filled in order; a file ends before the tensor that would exceed `shard_bytes`.

    stem: the beginning of the files' names.
    """
    shard_bytes = shard_bytes or SHARD_BYTES
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise RunError(f"tensor {next(name for name in names if names.count(name) > 1)} would be written twice")
    parts: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if parts[-1] and filled + spec.nbytes > shard_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(spec)
        filled += spec.nbytes
    if len(parts) == 1:
        return [weight_file(f"{stem}.safetensors", parts[0])]
    of = len(parts)
    return [weight_file(f"{stem}-{n:05d}-of-{of:05d}.safetensors", part) for n, part in enumerate(parts, start=1)]


def index_bytes(files: Sequence[WeightFile], specs: Sequence[TensorSpec]) -> bytes:
    """The index that says which of several files holds which tensor."""
    weight_map = {name: file.name for file in files for name in file.begins}
    total = sum(spec.nbytes for spec in specs)
    return json_bytes({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def weights_nbytes(specs: Sequence[TensorSpec], shard_bytes: int | None = None) -> int:
    """Exact bytes of the weight files and their index, from specs alone."""
    files = shards(specs, shard_bytes)
    return sum(file.nbytes for file in files) + (len(index_bytes(files, specs)) if len(files) > 1 else 0)
