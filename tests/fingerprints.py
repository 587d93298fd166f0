"""What a function will do, as text: its code and all that it has closed over, down to the files that paths lead to."""

import dataclasses
from collections.abc import Mapping, Set
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from transformers import PreTrainedConfig


def fingerprint(value: Any) -> str:
    """The same text for what is the same; TypeError where that cannot be said."""
    if value is None or isinstance(
        value, bool | int | float | str | bytes | torch.dtype | torch.Size | type | ModuleType
    ):
        return repr(value)
    if isinstance(value, Path):
        files = [value, *sorted(value.iterdir())] if value.is_dir() else [value]
        return repr([(str(file), _state(file)) for file in files])
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return (
            f"{value.__module__}.{value.__qualname__}{fingerprint([value.__defaults__, value.__kwdefaults__, cells])}"
        )
    if isinstance(value, partial):
        return fingerprint([value.func, value.args, value.keywords])
    if isinstance(value, Mapping):
        return f"{type(value)}{[(fingerprint(key), fingerprint(item)) for key, item in value.items()]}"
    if isinstance(value, Set):
        return f"{type(value)}{sorted(map(fingerprint, value))}"
    if isinstance(value, list | tuple):
        return f"{type(value)}{[fingerprint(item) for item in value]}"
    if isinstance(value, PreTrainedConfig):
        return f"{type(value)}{value.to_json_string(use_diff=False)}"
    if dataclasses.is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value)}{fingerprint(parts)}"
    raise TypeError(f"whether a {type(value)} is the same cannot be said")


def _state(file: Path) -> object:
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
