"""Extension points: a module of a package is found by the one object that it offers under an agreed name."""

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
    """The objects called `attribute` in the modules of `package`, by their `name`, in alphabetical order.

    Modules without the attribute are not imported. RuntimeError for two objects of one name, a programming error.
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
    """A hint for an unknown word: the nearest known word, and all known words."""
    near = get_close_matches(word, known, n=1)
    listing = "known: " + ", ".join(sorted(known))
    return f"did you mean {near[0]!r}? {listing}" if near else listing
