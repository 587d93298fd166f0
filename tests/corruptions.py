"""Damage to plant in an output: every kind that fits, as a name and what does it to a copy."""

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from llmcompress.validate.stored import Tensor, read_tensors


@dataclass(frozen=True)
class Corruption:
    """kind: what its count is printed under. plant: damages the copy of the output at a path."""

    kind: str
    name: str
    plant: Callable[[Path], object]


STRAYS = {
    "pytorch_model.bin": b"\x80\x04.",
    "weights.pt": b"\x80\x04.",
    "stray.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "modeling_stray.py": b"raise SystemExit",
    ".hidden": b"x",
    ".git/hooks/post-checkout": b"#!/bin/sh",
    "tokenizer.model": b"x",
    "special_tokens_map.json": b"{}",
    "added_tokens.json": b"{}",
    "chat_template.json": b"{}",
    "additional_chat_templates/tool.jinja": b"{{ x }}",
    "adapter_config.json": b"{}",
    "preprocessor_config.json": b"{}",
    "custom_generate/generate.py": b"raise SystemExit",
    "model.safetensors.bak": b"x",
    "config.json.orig": b"{}",
    "report.json~": b"{}",
    "channels.npz.old": b"x",
    "notes.txt": b"x",
    "x\x1b[2J.txt": b"x",
}


def corruptions(out: Path, other: Path, single: bool = False) -> Iterator[Corruption]:
    """All damage to the directory `out`, or to the GGUF file and its papers there (`single`).

    other: another model's output of the same kind.
    """
    for file in sorted(path for path in out.rglob("*") if path.is_file()):
        name = str(file.relative_to(out))
        if name != "README.md":  # which people may edit
            yield from _of_a_file(name, file, other / name)
        if name.endswith(".json"):
            yield from _of_json(name, json.loads(file.read_text()))
        if name.endswith(".gguf"):
            yield from _of_gguf(name, file)
    if any(out.glob("*.safetensors")):
        yield from _of_tensors(read_tensors(out), out)
    if single:
        return
    yield from _of_the_directory()
    yield Corruption("file", "README.md deleted", lambda copy: (copy / "README.md").unlink())


def _of_the_directory() -> Iterator[Corruption]:
    for name, data in STRAYS.items():

        def stray(copy: Path, name: str = name, data: bytes = data) -> None:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(data)

        yield Corruption("stray", f"{name!a} added", stray)
    yield Corruption("stray", "a directory added", lambda copy: (copy / "empty").mkdir())
    yield Corruption("stray", "a link added", lambda copy: (copy / "link.json").symlink_to("config.json"))
    yield Corruption("stray", "a link to a directory added", lambda copy: (copy / "more").symlink_to("/tmp"))
    yield Corruption("stray", "a dangling link added", lambda copy: (copy / "gone").symlink_to("nowhere"))
    yield Corruption("stray", "a pipe added", lambda copy: os.mkfifo(copy / "pipe"))


def _of_a_file(name: str, file: Path, other: Path) -> Iterator[Corruption]:
    data = file.read_bytes()
    changed = {
        "emptied": b"",
        "cut in half": data[: len(data) // 2],
        "cut by a byte": data[:-1],
        "longer by a newline": data + b"\n",
        "first byte flipped": _flipped(data, 0),
        "middle bit flipped": _flipped(data, len(data) // 2),
        "last bit flipped": _flipped(data, len(data) - 1),
    }
    if other.is_file() and other.read_bytes() != data:
        changed["that of another model"] = other.read_bytes()
    for how, content in changed.items():
        yield Corruption("file", f"{name} {how}", lambda copy, content=content: (copy / name).write_bytes(content))
    yield Corruption("file", f"{name} deleted", lambda copy: (copy / name).unlink())

    def link(copy: Path) -> None:
        shutil.move(copy / name, copy.with_name("moved"))
        (copy / name).symlink_to(copy.with_name("moved"))

    def folder(copy: Path) -> None:
        (copy / name).unlink()
        (copy / name).mkdir()

    def pipe(copy: Path) -> None:
        (copy / name).unlink()
        os.mkfifo(copy / name)

    yield Corruption("link", f"{name} is a link", link)
    yield Corruption("link", f"{name} is a directory", folder)
    yield Corruption("link", f"{name} is a pipe", pipe)
    yield Corruption("file", f"{name} renamed", lambda copy: (copy / name).rename(copy / f"{name}.x"))


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _of_json(name: str, value: Any) -> Iterator[Corruption]:
    kind = "report" if name.endswith("report.json") else "config" if name == "config.json" else "json"

    def edit(how: str, change: Callable[[Any], object]) -> Corruption:
        def plant(copy: Path) -> None:
            content = json.loads((copy / name).read_text())
            change(content)
            (copy / name).write_text(json.dumps(content, indent=2) + "\n")

        return Corruption(kind, f"{name} {how}", plant)

    for path in _paths(value, 2 if name != "tokenizer.json" else 1):
        shown = "/".join(map(str, path))
        yield edit(f"without {shown}", lambda content, path=path: _parent(content, path).pop(path[-1]))
        yield edit(f"with another {shown}", lambda content, path=path: _change(content, path))
    yield edit("with a key more", lambda content: content.update(surprise=1))
    yield edit("with auto_map", lambda content: content.update(auto_map={"AutoModelForCausalLM": "evil.Model"}))


def _paths(value: Any, depth: int) -> Iterator[tuple[Any, ...]]:
    """Places in a document, a few of every list and of every long object."""
    items = list(value.items())[:60] if isinstance(value, dict) else list(enumerate(value))[:1]
    for key, inner in items:
        yield (key,)
        if depth and isinstance(inner, dict | list):
            yield from ((key, *path) for path in _paths(inner, depth - 1))


def _parent(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        content = content[key]
    return content


def _change(content: Any, path: tuple[Any, ...]) -> None:
    holder = _parent(content, path)
    old = holder[path[-1]]
    kinds = {bool: lambda: not old, int: lambda: old + 1, float: lambda: old * 1.5 + 0.25, str: lambda: f"{old}x"}
    holder[path[-1]] = kinds[type(old)]() if type(old) in kinds else "other"


def _of_tensors(tensors: dict[str, Tensor], out: Path) -> Iterator[Corruption]:
    """Bits flipped in a tensor of every kind, tensors zeroed and swapped, and headers that say something else."""

    def patch(tensor: Tensor, data: bytes) -> Callable[[Path], None]:
        def plant(copy: Path) -> None:
            with (copy / tensor.file.name).open("r+b") as handle:
                handle.seek(tensor.begin)
                handle.write(data)

        return plant

    kinds: dict[tuple[str, str], list[Tensor]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((name.rpartition(".")[2], tensor.dtype), []).append(tensor)
    for (kind, dtype), group in kinds.items():
        first, last = group[0], group[-1]
        raw = first.raw().tobytes()
        yield Corruption("tensor", f"{first.name}: a bit flipped", patch(first, _flipped(raw, len(raw) // 3)))
        yield Corruption("tensor", f"{last.name}: last bit flipped",
                         patch(last, _flipped(last.raw().tobytes(), last.nbytes - 1)))  # fmt: skip
        yield Corruption(
            "tensor", f"{first.name}: turned round", patch(first, raw[::-1] if raw != raw[::-1] else b"\7")
        )
        pair = next(
            ((a, b) for a in group for b in group if a.shape == b.shape and a.raw().tobytes() != b.raw().tobytes()),
            None,
        )
        if pair is not None:

            def swap(copy: Path, pair: tuple[Tensor, Tensor] = pair) -> None:
                a, b = pair
                data = a.raw().tobytes(), b.raw().tobytes()
                patch(a, data[1])(copy)
                patch(b, data[0])(copy)

            yield Corruption("tensor", f"{kind} {dtype}: two swapped", swap)
    for file in sorted(out.glob("*.safetensors")):
        yield from _of_header(file)


def _of_header(file: Path) -> Iterator[Corruption]:
    whole = file.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    first = next(name for name in header if name != "__metadata__")
    others = {"I32": "F32", "BF16": "F16", "F16": "BF16", "F32": "I32", "I8": "U8", "U8": "I8", "F8_E4M3": "U8"}

    def renamed(value: dict[str, Any]) -> dict[str, Any]:
        return {f"{name}x" if name == first else name: item for name, item in value.items()}

    def retyped(value: dict[str, Any]) -> dict[str, Any]:
        return {**value, first: {**value[first], "dtype": others.get(value[first]["dtype"], "I8")}}

    def reshaped(value: dict[str, Any]) -> dict[str, Any]:
        return {**value, first: {**value[first], "shape": [*value[first]["shape"], 1]}}

    def exchanged(value: dict[str, Any]) -> dict[str, Any]:
        like = [name for name in value if name != "__metadata__" and value[name]["shape"] == value[first]["shape"]
                and value[name]["dtype"] == value[first]["dtype"]]  # fmt: skip
        a, b = (like[0], like[-1]) if len(like) > 1 else (first, first)
        return {**value, a: value[b], b: value[a], **({} if a != b else {"__metadata__": {}})}

    changes: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "without metadata": lambda value: {name: item for name, item in value.items() if name != "__metadata__"},
        "with more metadata": lambda value: {**value, "__metadata__": {"format": "pt", "by": "x"}},
        "with another framework": lambda value: {**value, "__metadata__": {"format": "tf"}},
        "in another order": lambda value: dict(reversed(value.items())),
        "with a name changed": renamed,
        "with a type changed": retyped,
        "with a shape changed": reshaped,
        "with two tensors exchanged": exchanged,
        "with spaces": lambda value: value,
    }
    for how, change in changes.items():

        def plant(copy: Path, change: Any = change) -> None:
            text = json.dumps(change(header)).encode()
            (copy / file.name).write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])

        yield Corruption("header", f"{file.name} {how}", plant)


def _of_gguf(name: str, file: Path) -> Iterator[Corruption]:
    """Every key changed, removed and added, and a bit flipped in a tensor of each type."""
    reader, whole = gguf.GGUFReader(file), file.read_bytes()
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}

    def write(data: bytes) -> Callable[[Path], object]:
        return lambda copy: (copy / name).write_bytes(data)

    infos, start = min(tensor.field.offset for tensor in reader.tensors), reader.data_offset
    ends = [*[field.offset for field in fields.values()][1:], infos]
    last = reader.tensors[-1]
    info_end = last.field.offset + sum(part.nbytes for part in last.field.parts)
    first = next(iter(fields.values())).offset

    def header(count: int, keys: bytes) -> bytes:
        head = whole[: first - 8] + struct.pack("<Q", count) + keys + whole[infos:info_end]
        return head + bytes(-len(head) % reader.alignment) + whole[start:]

    for (key, field), end in zip(fields.items(), ends, strict=True):
        at = field.offset + sum(part.nbytes for part in field.parts[:-1])
        yield Corruption("gguf key", f"{name} with another {key}", write(_flipped(whole, at)))
        keys = whole[first : field.offset] + whole[end:infos]
        yield Corruption("gguf key", f"{name} without {key}", write(header(len(fields) - 1, keys)))
    more = struct.pack("<Q", 1) + b"x" + struct.pack("<II", 4, 7)
    yield Corruption("gguf key", f"{name} with a key more",
                     write(header(len(fields) + 1, whole[first:infos] + more)))  # fmt: skip
    kinds = {tensor.tensor_type: tensor for tensor in reader.tensors}
    for kind, tensor in kinds.items():
        yield Corruption("tensor", f"{name} {kind.name}: a bit flipped",
                         write(_flipped(whole, int(tensor.data_offset) + int(tensor.n_bytes) // 2)))  # fmt: skip
    for tensor in reader.tensors[:2]:
        at = tensor.field.offset + 8
        yield Corruption("header", f"{name} with a name changed", write(_flipped(whole, at)))
