"""Files of the items of tasks, and of worked examples beside them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from llmcompress.calib.dataset import is_saved, table_rows
from llmcompress.calib.default import shipped
from llmcompress.calib.jsonl import json_rows
from llmcompress.errors import CalibrationError
from llmcompress.isolation import Limit, isolated
from llmcompress.validate.task_items import HINT, Item, Written, item_of, layout_of
from llmcompress.validate.task_shots import Shots

_TABLES = (".jsonl", ".parquet")
_EXAMPLES = ".shots"  # at the end of the name of what holds examples


@dataclass(frozen=True)
class Task:
    """Items of one file."""

    name: str
    items: Sequence[Item]


def read_tasks(place: str, items: int | None = None, shots: int = 0) -> list[Task]:
    """The tasks of a file, or of the files of a folder; 'default': those that come with llmcompress.

    items: how many of each task, from its start; None for all. shots: examples that are read before each item.
    CalibrationError for what is no item, and for examples that are missing.
    """
    path = shipped("eval_data") / "tasks" if place == "default" else Path(place)
    if not path.exists():
        raise CalibrationError(f"--tasks {place}: there is no such file or folder", "give a .jsonl file, or 'default'")
    found = [path]
    if path.is_dir() and not is_saved(path):
        inside = (item for item in path.iterdir() if item.suffix in _TABLES or is_saved(item))
        found = sorted(item for item in inside if not _stem(item).endswith(_EXAMPLES))
        if not found:
            raise CalibrationError(f"{path} holds no tasks", "give .jsonl or .parquet files, or folders of datasets")
    stems = [_stem(item) for item in found]
    names = [item.name if stems.count(_stem(item)) > 1 else _stem(item) for item in found]
    return [Task(name, _items(item, items, shots)) for name, item in zip(names, found, strict=True)]


def _stem(path: Path) -> str:
    return path.stem if path.suffix in _TABLES else path.name


def _examples(path: Path) -> Path:
    """What holds the examples of a task."""
    stem = f"{_stem(path)}{_EXAMPLES}"
    found = next((place for end in (*_TABLES, "") if (place := path.with_name(stem + end)).exists()), None)
    if found is None:
        raise CalibrationError(
            f"{path} has no examples, which --shots takes", f"put them beside it as {stem}.jsonl or {stem}.parquet"
        )
    return found


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    return json_rows(path) if path.suffix == ".jsonl" else table_rows(path)


def _size(path: Path) -> int:
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def _items(path: Path, most: int | None, count: int) -> list[Item]:
    """The items of a file, which is read in a process of its own: a small table may unpack to a large one."""
    examples = _examples(path) if count else None

    def work(limit: Limit) -> Iterator[bytes]:
        limit(_size(path) + (_size(examples) if examples else 0))
        shots = Shots(examples, [item_of(*row) for row in _rows(examples)], count) if examples else None
        for where, row in islice(_rows(path), most):
            item = item_of(where, row)
            if shots is not None:
                item = replace(item, shots=shots.before(item, layout_of(where, row).spare))
            yield json.dumps(asdict(item)).encode()

    def failed(reason: str) -> CalibrationError:
        return CalibrationError(f"{path} cannot be read as items of a task: {reason}", HINT)

    found = []
    for data in isolated(work, failed):
        item = Item(**json.loads(data))
        pairs = [(prompt, choice) for prompt, choice in item.pairs]
        written = item.written and Written(**item.written)  # type: ignore[arg-type]  # a dictionary in JSON
        found.append(replace(item, pairs=pairs, written=written))
    if not found:
        raise CalibrationError(f"{path} holds no items", HINT)
    return found
