"""A GGUF file as the source of another: tensors are read by name as from a checkpoint, keys are copied."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import FLOAT_TYPES, TensorSpec
from llmcompress.formats.gguf.family import known_architectures
from llmcompress.formats.gguf.mixture import is_quantised
from llmcompress.store.checkpoint import DTYPES, Checkpoint
from llmcompress.store.gguf_header import GgufArray, GgufHeader
from llmcompress.store.gguf_header import GgufTensor as StoredTensor
from llmcompress.store.gguf_model import decodable, decoded, is_factor, read_gguf, tensor_bytes
from llmcompress.store.gguf_name import stem_of
from llmcompress.store.headers import ModelHeaders, Stored

if TYPE_CHECKING:
    from pathlib import Path

    from gguf import GGUFWriter

_LAYER = re.compile(r"blk\.(\d{1,9})\.")
_AT_ONCE = 1 << 24  # bytes
_MOST_EXPERTS = 4096
_OWN = re.compile(
    r"general\.(architecture|alignment|file_type|quantization_version)|split\.(no|count|tensors\.count)"
    r"|quantize\.imatrix\..*"
)
"""Keys that are not copied: the writer makes them anew, or leaves them out."""


@dataclass(frozen=True)
class GgufHeaders(ModelHeaders):
    """The header of a GGUF file. tensors: by GGUF name, float32 where the file stores codes.

    Every expert has a tensor of its own, such as `blk.0.ffn_up_exps.7.weight`. parts: for each tensor, the name of the
    tensor of the file that holds it, and its number among the experts there. config: what the file says of the keys
    that a config.json would have.
    """

    gguf: GgufHeader
    parts: Mapping[str, tuple[str, int]]

    @property
    def name(self) -> str:
        return stem_of(self.path)

    @property
    def nbytes(self) -> int:
        return self.gguf.nbytes

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the headers of all files."""
        digest = hashlib.sha256()
        for file in self.files:
            positions = (tensor.position for tensor in self.gguf.tensors.values() if tensor.file == file)
            start = min(positions, default=-1)  # of a file that holds keys alone, all of it
            with file.open("rb") as handle:
                digest.update(f"{file.name}:{file.stat().st_size}:".encode())
                digest.update(handle.read(start))
        return digest.hexdigest()

    @property
    def arch(self) -> str:
        """GGUF's name of the architecture."""
        return str(self.config["model_type"])

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    def number(self, key: str, default: int | None = None) -> int:
        """The whole number under a key of the architecture; of a list by layer, the first number above 0.

        CheckpointError if the file has no such number and there is no default.
        """
        name = f"{self.arch}.{key}"
        field = self.gguf.fields.get(name)
        if field is None and default is not None:
            return default
        value: Any = None if field is None else self.gguf.value(name)
        if field is not None and isinstance(field.value, GgufArray) and not isinstance(value, list):
            value = next((int(item) for item in value if item > 0), None)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{self.path} does not say {name} in a whole number", "convert the model anew")
        return value


def gguf_headers(path: "Path") -> GgufHeaders:
    """The header of a GGUF file; CheckpointError for an architecture or a type of tensor that is not known here."""
    header = read_gguf(path)
    field = header.fields.get("general.architecture")
    arch = None if field is None else field.value
    if arch not in known_architectures():
        raise CheckpointError(
            f"{path} holds a model of architecture {arch!r}, which is not known here",
            f"known: {', '.join(sorted(known_architectures()))}",
        )
    layers = _layer_count(path, header, str(arch))
    _check_tensors(path, header)
    tensors: dict[str, Stored] = {}
    parts: dict[str, tuple[str, int]] = {}
    for tensor in header.tensors.values():
        if is_factor(header, tensor.name):
            continue  # it is part of the values of another
        for number, (name, shape) in enumerate(_matrices(tensor)):
            spec = TensorSpec(name, tensor.type if tensor.type in FLOAT_TYPES else "F32", shape)
            tensors[name] = Stored(spec, tensor.file, tensor.position, tensor.position + tensor.nbytes)
            parts[name] = tensor.name, number
    config = {"model_type": arch, "num_hidden_layers": layers}
    if (named := header.fields.get("general.name")) is not None and isinstance(named.value, str):
        config["_name_or_path"] = named.value
    return GgufHeaders(path, config, tensors, header.files, header, parts)


def _layer_count(path: "Path", header: GgufHeader, arch: str) -> int:
    """The number of layers; CheckpointError unless keys and tensors agree on it."""
    numbers = {int(found[1]) for name in header.tensors if (found := _LAYER.match(name))}
    field = header.fields.get(f"{arch}.block_count")
    stated = None if field is None else field.value
    if stated != len(numbers) or numbers != set(range(len(numbers))):
        raise CheckpointError(f"{path} holds {len(numbers)} layers, {arch}.block_count is {stated}", "fetch it again")
    return len(numbers)


def _check_tensors(path: "Path", header: GgufHeader) -> None:
    for tensor in header.tensors.values():
        if len(tensor.shape) > 2 and tensor.shape[0] > _MOST_EXPERTS:
            raise CheckpointError(f"{path}: tensor {tensor.name} holds {tensor.shape[0]} experts, which no model has")
        if tensor.type not in FLOAT_TYPES and not decodable(tensor):
            raise CheckpointError(f"{path}: tensor {tensor.name} has type {tensor.type}, which cannot be decoded here")


def names_of(tensor: StoredTensor) -> tuple[str, ...]:
    """The names under which a tensor of a file is read: its own name, or one name for each expert."""
    return tuple(name for name, _ in _matrices(tensor))


def _matrices(tensor: StoredTensor) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every matrix that a tensor holds."""
    if len(tensor.shape) == 3 and is_quantised(tensor.name, tensor.shape):
        stem = tensor.name.removesuffix(".weight")
        for number in range(tensor.shape[0]):
            yield f"{stem}.{number}.weight", tensor.shape[1:]
    else:
        yield tensor.name, tensor.shape


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file; the gguf package decodes codes."""

    headers: GgufHeaders

    def read(self, name: str) -> Tensor:
        if name not in self.headers.parts:
            raise CheckpointError(f"tensor {name} is missing from {self.path}")
        whole, number = self.headers.parts[name]
        spec, header = self.headers.tensors[name].spec, self.headers.gguf
        tensor = header.tensors[whole]
        if tensor.type not in FLOAT_TYPES:
            rows = spec.shape[0] if len(spec.shape) > 1 else 1
            return torch.from_numpy(decoded(header, whole, number * rows, (number + 1) * rows)).reshape(spec.shape)
        raw = tensor_bytes(header, whole)[number * spec.nbytes : (number + 1) * spec.nbytes]
        return torch.from_numpy(raw.copy()).view(DTYPES[spec.dtype]).reshape(spec.shape)

    def rows(self, name: str) -> None:
        """No rows are read alone: no text runs through a model in a GGUF file."""

    def stored(self, name: str, kind: str) -> Iterator[memoryview] | None:
        tensor = self.headers.gguf.tensors.get(name)  # factors are made of what the file has not
        if tensor is None or tensor.type != kind or kind in FLOAT_TYPES:
            return None
        raw = tensor_bytes(self.headers.gguf, name)
        return (raw[at : at + _AT_ONCE].data for at in range(0, tensor.nbytes, _AT_ONCE))


def carried_keys(headers: GgufHeaders, file_type: int) -> "Callable[[GGUFWriter], None]":
    """A function that writes the keys of a file to another file; keys about quantisation are made anew."""
    from gguf import GGML_QUANT_VERSION, GGUFValueType

    def describe(writer: "GGUFWriter") -> None:
        for key, field in headers.gguf.fields.items():
            if _OWN.fullmatch(key):
                continue
            if not isinstance(field.value, GgufArray):
                writer.add_key_value(key, field.value, GGUFValueType[field.type])
            elif field.value.count:  # an empty list says nothing, and the package writes none
                value: Any = headers.gguf.value(key)
                items = value if isinstance(value, list) else value.tolist()
                writer.add_key_value(key, items, GGUFValueType.ARRAY, sub_type=GGUFValueType[field.value.type])
        writer.add_file_type(file_type)
        writer.add_quantization_version(GGML_QUANT_VERSION)

    return describe
