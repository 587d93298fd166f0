"""A name means one thing: no two public classes share one, and two modules only where both are about one thing."""

import ast
import re
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "llmcompress"
# classes that published JSON schemas name; a document may call a thing as the code does
DOCUMENTS = ("engine/write/report_schema.py", "validate/evaluation.py")
# a member of an axis gives its name to all modules about it: arch/llama.py and formats/gguf/families/llama.py
MEMBER = re.compile(r"^(ARCH|FORMAT|GRID|METHOD|PRUNER|SOURCE|TARGET|TRANSFORM)\b", re.MULTILINE)
# a command, its function in Python, and the room that does their work
COMMANDS = {
    "drafting",
    "evaluation",
    "fitting",
    "imatrix",
    "long_text",
    "lora",
    "page",
    "presets",
    "recipes",
    "statistics",
    "structure",
}
STILL_SHARED_MODULES = {"errors", "inputs"}


def shared(pairs):
    """Names that stand for several things, and where."""
    found = defaultdict(list)
    for name, place in pairs:
        found[name].append(place)
    return {name: places for name, places in found.items() if len(places) > 1}


def classes():
    for file in sorted(SOURCE.rglob("*.py")):
        place = file.relative_to(SOURCE).as_posix()
        for node in ast.parse(file.read_text()).body if place not in DOCUMENTS else ():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, place


def modules():
    members = {file.stem for file in SOURCE.rglob("*.py") if MEMBER.search(file.read_text())} | {"__init__", "base"}
    for file in sorted(SOURCE.rglob("*.py")):
        command = file.stem in COMMANDS and file.parent.name in ("api", "cli")
        if file.stem not in members and not command:
            yield file.stem, file.relative_to(SOURCE).as_posix()


def test_no_two_public_classes_share_a_name():
    assert shared(classes()) == {}


def test_modules_share_a_name_only_about_one_thing():
    assert shared(modules()).keys() - STILL_SHARED_MODULES == set()


def test_what_shares_a_name_is_found():
    assert shared([("a", 1), ("b", 2), ("a", 3)]) == {"a": [1, 3]}
    assert {"Plan", "Ledger", "Method"} <= {name for name, _ in classes()}
    assert {"make_plan", "obs", "llama"} & {name for name, _ in modules()} == {"make_plan"}
