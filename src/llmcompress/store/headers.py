"""The contents of a model directory from JSON files and safetensors headers: no tensor is read, no torch is needed.

A safetensors file is a little-endian u64 (header length), that many bytes of JSON, then the data without gaps.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import ITEM_SIZE, TensorSpec
from llmcompress.store.expert_stacks import Cut, ExpertStack

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MAX_HEADER = 100_000_000  # the safetensors library's limit, used here for any JSON
_DIGITS = 300  # of an integer: a float holds no larger one
_SAMPLES = 64  # spans per file that `contents` reads
_SAMPLE_BYTES = 4096
_AGAIN = "fetch the file again"

# what belongs to a model besides weights and config.json; README.md is written anew
SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model*",
    "spiece.model",
    "sentencepiece*.model",
    "tekken.json",
    "*.spm",
    "*.tiktoken",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "LICENSE*",
    "LICENCE*",
    "License*",
    "license*",
    "COPYING*",
    "NOTICE*",
    "Notice*",
    "USE_POLICY*",
)
SETTINGS = "hf_quant_config.json"  # where ModelOpt says what may also stand in config.json


@dataclass(frozen=True)
class Stored:
    """The place of a tensor: its spec, its file, and its byte range within the file's data.

    cut: what of these bytes the tensor is, where they hold more.
    """

    spec: TensorSpec
    file: Path
    begin: int
    end: int
    cut: Cut | None = None


@dataclass(frozen=True)
class Merged:
    """What is merged into tensors while they are read. sha256: of where it comes from. changes: by tensor, in order."""

    sha256: str
    changes: Mapping[str, Sequence[Callable[[Any], Any]]]


@dataclass(frozen=True)
class ModelHeaders:
    """A model directory by its headers: config.json and the specs of all tensors by on-disk name, in file order.

    wrapper: config.json of a multimodal model, of which `config` is then what it says of the language model. merged:
    an adapter that belongs to the model. unstacked: tensors of the files that hold something of every expert, which
    `tensors` has one by one; their parts are named, `{e}` standing for the expert's number.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    files: tuple[Path, ...]
    wrapper: Mapping[str, Any] | None = field(default=None, kw_only=True)
    merged: Merged | None = field(default=None, kw_only=True)
    unstacked: Mapping[str, ExpertStack] = field(default_factory=dict, kw_only=True)

    @property
    def nbytes(self) -> int:
        return sum(stored.spec.nbytes for stored in self.tensors.values())

    @property
    def name(self) -> str:
        """The name of the model: that of its directory."""
        return self.path.resolve().name

    @property
    def whole_config(self) -> Mapping[str, Any]:
        """What config.json says, but for what a reader takes out of it."""
        return self.config if self.wrapper is None else self.wrapper

    @property
    def place(self) -> Path:
        """The file of the weights, or the directory if there are several files."""
        return self.files[0] if len(self.files) == 1 else self.path

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of config.json and of every safetensors header: cheap, and different for any other layout."""
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for file in self.files:
            header, size = _raw_header(file)
            digest.update(f"{file.name}:{size}:".encode())
            digest.update(header)
        return digest.hexdigest()

    @cached_property
    def contents(self) -> str:
        """SHA-256 of the fingerprint, of samples of the data and of an adapter: a fine-tune of the same layout differs.

        Reads at most 64 spans of 4 KiB per file, evenly spread; the only member that looks beyond the headers.
        """
        digest = hashlib.sha256(self.fingerprint.encode())
        if self.merged is not None:
            digest.update(self.merged.sha256.encode())
        for file in self.files:
            size = file.stat().st_size
            step = max(_SAMPLE_BYTES, -(-size // _SAMPLES))
            with file.open("rb") as handle:
                for start in range(0, size, step):
                    handle.seek(start)
                    digest.update(handle.read(_SAMPLE_BYTES))
        return digest.hexdigest()


def read_headers(path: Path) -> ModelHeaders:
    """Headers of the model directory `path`; CheckpointError names the file and the fault."""
    if not path.is_dir():
        _refuse_non_directory(path)
    refuse_links(path)
    refuse_adapter(path)
    config = read_json(path / "config.json")
    files, weight_map = _weight_files(path)
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, stored in read_file_header(file).items():
            if name in tensors:
                both = f"{tensors[name].file.name} and {file.name}"
                raise CheckpointError(f"tensor {name} stands in both {both} of {path}")
            tensors[name] = stored
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(
                f"{path / INDEX} says tensor {_shown(name)} is in {shard}, but it is not", "fetch the shards again"
            )
    return ModelHeaders(path, config, tensors, files)


def with_settings(stored: ModelHeaders) -> ModelHeaders:
    """The same headers with what a file of its own says of quantisation, where config.json says nothing."""
    file = stored.path / SETTINGS
    if "quantization_config" in stored.config or not file.exists():
        return stored
    settings = read_json(file).get("quantization")
    if not isinstance(settings, Mapping) or not settings.get("quant_algo"):
        return stored
    return replace(stored, config={**stored.config, "quantization_config": {"quant_method": "modelopt", **settings}})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`, or a CheckpointError naming the file and the place."""
    try:
        if path.exists() and not path.is_file():  # a pipe would block for ever
            raise CheckpointError(f"{path} is not a file")
        if path.stat().st_size > _MAX_HEADER:
            raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes, {_MAX_HEADER:,} at most are read")
        raw = path.read_bytes()
        _refuse_bombs(raw)
        value = json.loads(raw, parse_int=_integer)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.name} is missing in {path.parent}", "give a directory as transformers saves it"
        ) from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _integer(digits: str) -> int:
    """A number of JSON; ValueError for one that no float can hold, which every use would have to expect."""
    if len(digits) > _DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, {_DIGITS} at most are read")
    return int(digits)


def read_file_header(file: Path) -> dict[str, Stored]:
    """Tensors of one safetensors file, checked: known types, extents that match, no gap, no overlap, none missing."""
    raw, size = _raw_header(file)
    try:
        _refuse_bombs(raw)
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} has a damaged safetensors header: {error}", _AGAIN) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a damaged safetensors header: not an object", _AGAIN)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file} has a damaged safetensors header: __metadata__ is not text by name", _AGAIN)
    data = size - 8 - len(raw)
    found = sorted((_entry(file, name, item) for name, item in header.items()), key=lambda at: (at.begin, at.end))
    position = 0
    for stored in found:
        if stored.begin != position or stored.end - stored.begin != stored.spec.nbytes:
            raise CheckpointError(f"{file} has a damaged safetensors header at tensor {stored.spec.name}", _AGAIN)
        if stored.end > data:
            raise CheckpointError(f"{file} is truncated: {data} bytes of data end in tensor {stored.spec.name}", _AGAIN)
        position = stored.end
    if position != data:
        raise CheckpointError(f"{file} has {data - position} bytes that belong to no tensor", _AGAIN)
    return {stored.spec.name: stored for stored in found}


def _raw_header(file: Path) -> tuple[bytes, int]:
    """The JSON of a safetensors file, unparsed, and the size of the whole file."""
    try:
        if not file.is_file():  # a pipe would block for ever
            raise CheckpointError(f"{file} is not a file")
        with file.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            prefix = handle.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if len(prefix) < 8 or length > min(_MAX_HEADER, size - 8):
                raise CheckpointError(f"{file} is not a whole safetensors file ({size} bytes)", _AGAIN)
            return handle.read(length), size
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None


def _refuse_bombs(raw: bytes) -> None:
    """ValueError for JSON that would take many times its own size once parsed, such as a million empty lists.

    What programs write about models takes some ten times its size. Up to a megabyte the size does not matter.
    """
    parsed = 64 * (raw.count(b"[") + raw.count(b"{")) + 36 * raw.count(b",")
    if parsed > 16 * len(raw) + (1 << 20):
        raise ValueError("it would take many times its size")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key given twice is refused, since readers disagree on which one counts."""
    items = dict(pairs)
    if len(items) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return items


def _entry(file: Path, name: str, item: Any) -> Stored:
    fields = item if isinstance(item, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    # control characters and lone surrogates: no program that saves models writes them into names
    if name.isprintable() and isinstance(dtype, str) and dtype not in ITEM_SIZE:
        raise CheckpointError(
            f"{file}: tensor {name} has type {dtype!r}, which is not supported", f"known: {', '.join(ITEM_SIZE)}"
        )
    if (
        not (name.isprintable() and isinstance(dtype, str))
        or not (isinstance(shape, list) and _are_sizes(shape))
        or not (isinstance(offsets, list) and len(offsets) == 2 and _are_sizes(offsets))
    ):
        raise CheckpointError(f"{file} has a damaged safetensors header at tensor {_shown(name)}", _AGAIN)
    return Stored(TensorSpec(name, dtype, tuple(shape)), file, offsets[0], offsets[1])


def _are_sizes(values: Iterable[Any]) -> bool:
    """Whether all values are integers that fit a u64; true and false, ints in Python, are refused."""
    return all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64 for value in values)


def _shown(name: str) -> str:
    """A name from a file, made safe to print."""
    return name if name.isprintable() else ascii(name)


def _weight_files(path: Path) -> tuple[tuple[Path, ...], Mapping[str, str]]:
    """The safetensors files of a model directory, and the index's file of each tensor (empty without an index)."""
    single = path / SINGLE
    if (path / INDEX).exists():
        files, names = _indexed_files(path)
        if single.exists() and set(names.values()) != {SINGLE}:  # which mlx-lm writes, and says the same
            raise CheckpointError(
                f"{path} has both {SINGLE} and {INDEX}, and loaders disagree on which one counts", "remove one of them"
            )
        return files, names
    if single.exists():
        return (inside(path, single),), {}
    others = sorted(file.name for file in path.glob("*.safetensors"))
    if len(others) == 1:
        return (inside(path, path / others[0]),), {}
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{path} holds pickled weights ({pickles[0]}), which can run code when read",
            "convert them to safetensors first: load with transformers and save_pretrained",
        )
    if others:
        raise CheckpointError(f"{path} has {len(others)} safetensors files but no {INDEX}")
    raise CheckpointError(f"{path} has no {SINGLE}", "give a directory as transformers saves it")


def _indexed_files(path: Path) -> tuple[tuple[Path, ...], Mapping[str, str]]:
    index = path / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map of tensor names to files")
    for name in weight_map.values():
        # a name only, of a file that transformers writes: nothing that leads out of the directory
        if not isinstance(name, str) or not name.endswith(".safetensors") or {"/", "\\", "\0"} & set(name):
            raise CheckpointError(f"{index} names {name!r}, which is not a safetensors file of this directory")
    files = []
    for name in sorted(set(weight_map.values())):
        try:
            missing = not (path / name).exists()
        except OSError:  # a name longer than the file system allows
            missing = True
        if missing:
            raise CheckpointError(f"{index} names {_shown(name)}, which is missing", "fetch the missing shard")
        files.append(inside(path, path / name))
    return tuple(files), weight_map


def inside(path: Path, file: Path) -> Path:
    """`file`, unless it is a link that leaves the model directory `path`: CheckpointError.

    A model that was fetched from somewhere must not choose which other files of this machine are read, and copied into
    an output. Hub downloads are the exception: in `models--org--name/snapshots/<commit>/` every file is a link to
    `../../blobs/<hash>`. So where the model directory is such a snapshot, links into the blobs of the same
    `models--*` folder are followed, and no others.
    """
    try:
        root, target = path.resolve(), file.resolve()
    except (OSError, RuntimeError):  # RuntimeError: a circle of links, before Python 3.13
        raise CheckpointError(f"{file} is a link that leads nowhere", _AGAIN) from None
    allowed = [root]
    snapshots, cached = root.parent, root.parent.parent
    if snapshots.name == "snapshots" and cached.name.startswith("models--"):
        allowed.append(cached / "blobs")
    if not any(base in target.parents for base in allowed):
        raise CheckpointError(f"{file} is a link that leaves the model directory", "copy the file into the directory")
    return file


def refuse_links(path: Path) -> None:
    """CheckpointError if a config, tokenizer file, template, licence or Python file is a link that leaves `path`."""
    for folder in (path, path / "additional_chat_templates"):
        for file in folder.iterdir() if folder.is_dir() else ():
            if file.is_symlink() and _is_read(str(file.relative_to(path))):
                inside(path, file)


def refuse_adapter(path: Path) -> None:
    """CheckpointError for a directory that holds an adapter and no model."""
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise CheckpointError(
            f"{path} is an adapter without its base model",
            "give the model it belongs to, and the adapter as --adapter",
        )


def _is_read(name: str) -> bool:
    """Whether we or transformers read a file of a model directory; weights are checked when they are used."""
    patterns = ("*.json", "*.py", "*.jinja", "README.md", "additional_chat_templates", *SIDE_FILES)
    return not name.startswith(".") and any(fnmatchcase(name, pattern) for pattern in patterns)


def _refuse_non_directory(path: Path) -> None:
    if path.is_file():
        hint = "give the directory that holds config.json, or a .gguf file"
        raise CheckpointError(f"{path} is a file, not a model directory", hint)
    beside = [item.name for item in path.parent.glob("*") if item.is_dir()]  # none where it may not be read
    if near := get_close_matches(path.name, beside, n=1):
        raise CheckpointError(f"{path} does not exist", f"did you mean {path.with_name(near[0])}?")
    alone = str(path.parent) == "." or (str(path).count("/") == 1 and not path.parent.exists())
    if alone and not str(path).startswith((".", "~", os.sep)):
        raise CheckpointError(
            f"{path} is not a directory; llmcompress is offline and takes no hub ids",
            "give the directory of a model, downloaded first if it is on a hub",
        )
    raise CheckpointError(f"{path} does not exist", "give a model directory")
