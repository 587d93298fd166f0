"""Extension points by file: every public module of a package offers one object under an agreed name."""

import importlib
import importlib.util
import pkgutil
import re
from difflib import get_close_matches
from functools import cache
from types import ModuleType
from typing import Any


@cache
def discover(package: ModuleType, attribute: str) -> dict[str, Any]:
    """Objects named `attribute` of all modules in `package` that have one, by their `name`, in alphabetical order.

    Modules without the attribute are plain parts of the package, and are not imported. Two objects of one name are a
    programming error.
    """
    found: dict[str, Any] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        module = f"{package.__name__}.{info.name}"
        spec = importlib.util.find_spec(module)
        source = getattr(spec and spec.loader, "get_source", lambda name: None)(module)
        if source is not None and not re.search(rf"^{attribute}\b", source, re.MULTILINE):
            continue
        item = getattr(importlib.import_module(module), attribute, None)
        if item is None:
            continue
        if item.name in found:
            raise RuntimeError(f"{package.__name__} offers {item.name!r} twice")
        found[item.name] = item
    return dict(sorted(found.items()))


def suggest(word: str, known: list[str]) -> str:
    """A hint for an unknown word: the nearest known one, and all of them."""
    near = get_close_matches(word, known, n=1)
    listing = "known: " + ", ".join(sorted(known))
    return f"did you mean {near[0]!r}? {listing}" if near else listing
