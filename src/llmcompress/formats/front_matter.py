"""The front matter of a model's README: what its makers say of licence, origin and tags."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcompress.yamlfile import read_yaml

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""The name of a model on a hub: `owner/name`."""
_LARGEST = 1_000_000  # characters of a README in which front matter is looked for
_LONGEST = 1000  # characters of a value: it comes from a stranger's file
_BLOCK = re.compile(r"---\r?\n(.*?)\r?\n---\s*(\r?\n|$)", re.DOTALL)


def beginning_of_readme(file: Path) -> str:
    """The first part of a README, which holds the front matter; empty where there is no README."""
    if not file.is_file():
        return ""
    with file.open(encoding="utf-8", errors="replace") as handle:
        return handle.read(_LARGEST)


def front_matter(readme: str, base_model: str | None = None, licence: str | None = None) -> Mapping[str, Any]:
    """The YAML at the beginning of a README; nothing where there is none that parses.

    base_model, licence: what a user says in place of what stands there.
    """
    found = _BLOCK.match(readme)
    try:
        matter = read_yaml(found[1]) if found else None
    except ValueError:
        matter = None
    said = dict(matter) if isinstance(matter, dict) else {}
    if licence is not None:  # name and link are of the licence that stood there
        said = {key: value for key, value in said.items() if not str(key).startswith("license_")} | {"license": licence}
    return said if base_model is None else said | {"base_model": base_model}


def names(value: Any) -> list[str]:
    """The names among a value of front matter or a list of them. YAML takes Norwegian's `no` for false."""
    values = value if isinstance(value, list) else [value]
    values = ["no" if item is False else item for item in values]
    return [item for item in values if isinstance(item, str) and item and item.isprintable() and len(item) <= _LONGEST]


def hub_ids(value: Any) -> list[str]:
    """The names among a value of front matter that are `owner/name`."""
    return [name for name in names(value) if HUB_ID.fullmatch(name)]
