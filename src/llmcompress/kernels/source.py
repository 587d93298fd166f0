"""Sources of kernels as one text each: a compiler then needs no include path, and a hash covers all there is."""

import re
from functools import cache
from pathlib import Path

_DIRECTORY = Path(__file__).parent / "csrc"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*\n", re.MULTILINE)


@cache
def source_text(name: str) -> str:
    """A file of csrc/ with the files it includes in their places, each once."""
    return expanded(name, _DIRECTORY)


def expanded(name: str, directory: Path) -> str:
    """As `source_text`, of any directory."""
    seen = {name}

    def of(file: str) -> str:
        text = _ONCE.sub("", (directory / file).read_text(encoding="utf-8"))
        return _INCLUDE.sub(lambda found: included(found[1]), text)

    def included(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        return of(file)

    return of(name)
