"""The files of a model directory that belong to every model made of it: tokenizer, templates, licences, custom code."""

import ast
import os
import re
from pathlib import Path

from llmcompress.errors import CheckpointError
from llmcompress.store.headers import SIDE_FILES, inside, read_json

_LARGEST = 64_000_000  # bytes; the largest tokenizers have some 35 MB
_LARGE = ("tokenizer.json", "vocab.json", "tekken.json")  # whoever loads the tokenizer parses these
_TOKENIZERS = (*_LARGE, "tokenizer.model", "spiece.model", "merges.txt", "vocab.txt", "tokenizer_config.json",
               "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")  # fmt: skip
_BESIDE_TOKENIZERS = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_NAMING_CODE = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json",
                "video_preprocessor_config.json")  # fmt: skip
_HINT = "fetch the file again, or remove it"


def side_files(source: Path) -> list[Path]:
    """The side files of a model directory, sorted; never weights. Links are followed, but not out of the directory.

    CheckpointError for one that cannot be read or is no side file by its size, and for JSON that does not parse: what
    cannot be copied is known before a run begins.
    """
    try:
        found = {file for pattern in SIDE_FILES for file in source.glob(pattern) if file.is_file()}
        found |= _custom_code(source)
    except OSError as error:  # such as a name that is too long
        raise CheckpointError(f"the files of {source} cannot be listed: {error}", _HINT) from None
    for file in sorted(found):
        _check(source, file)
    return sorted(found)


def read_side_file(source: Path, file: Path) -> bytes:
    """The content of a side file; CheckpointError if it cannot be read any more."""
    try:
        return inside(source, file).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}", _HINT) from None


def has_tokenizer(source: Path) -> bool:
    """Whether a model directory holds a file that a tokenizer can be made of, were it code."""
    return any((source / name).is_file() for name in _TOKENIZERS if name not in _BESIDE_TOKENIZERS) or any(
        file for pattern in ("*.model", "*.tiktoken", "*.py") for file in source.glob(pattern)
    )


def tokenizer_size(source: Path) -> int:
    """What bounds the loading of a tokenizer, by its largest file; CheckpointError for one that no tokenizer has."""
    sizes = {name: (source / name).stat().st_size for name in _TOKENIZERS if (source / name).is_file()}
    for name, size in sizes.items():
        if size > _LARGEST:
            raise CheckpointError(f"{source / name} has {size:,} bytes, {_LARGEST:,} at most are read", _HINT)
    return max(sizes.values(), default=0) // 50


def _check(source: Path, file: Path) -> None:
    try:
        with inside(source, file).open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            handle.read(1)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}", _HINT) from None
    if size > _LARGEST:
        raise CheckpointError(f"{file} has {size:,} bytes, {_LARGEST:,} at most are copied", _HINT)
    if file.suffix == ".json" and file.name not in _LARGE:
        read_json(file)


def _custom_code(source: Path) -> set[Path]:
    """Python files that `auto_map` names, and those they import from beside them."""
    waiting: list[str] = []
    for name in _NAMING_CODE:
        auto_map = read_json(source / name).get("auto_map") if (source / name).exists() else None
        for value in auto_map.values() if isinstance(auto_map, dict) else ():
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, str) and re.fullmatch(r"\w+\.\w+", item):  # "repo--module.Class" is elsewhere
                    waiting.append(item.partition(".")[0])
    found: set[Path] = set()
    while waiting:
        file = source / f"{waiting.pop()}.py"
        if file in found or not file.is_file():
            continue
        _check(source, file)
        found.add(file)
        waiting += _siblings(file)
    return found


def _siblings(file: Path) -> list[str]:
    """Modules that a Python file imports relative to itself; none if it cannot be parsed."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found += [node.module] if node.module else [alias.name for alias in node.names]
    return found
