"""The grid is an axis: nobody outside `grids/` asks for the class of a grid, and methods declare no field of one."""

import ast
from pathlib import Path

import pytest

from llmcompress.grids.grid_type import grid_types
from llmcompress.methods.base import CommonOptions, Method

SOURCE = Path(__file__).parents[2] / "src" / "llmcompress"
ROOTS = {"Spec", "Grid", "GridType", "InputSpec", "InputGrid"}


def classes() -> set[str]:
    """Names of all classes of `grids/` that are a spec or a grid, and of unions of them."""
    found, before = set(ROOTS), None
    while found != before:
        before = set(found)
        for file in (SOURCE / "grids").glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef) and found & names(*node.bases):
                    found.add(node.name)
                elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and found & names(node.value):
                    found |= names(*node.targets)
    return found


def names(*nodes: ast.AST) -> set[str]:
    """What is named in expressions."""
    inner = [item for node in nodes for item in ast.walk(node)]
    return {item.id for item in inner if isinstance(item, ast.Name)} | {
        item.attr for item in inner if isinstance(item, ast.Attribute)
    }


def asked_of(node: ast.AST) -> set[str]:
    """The classes that an expression or pattern compares a value's class with."""
    if isinstance(node, ast.Call) and names(node.func) & {"isinstance", "issubclass"}:
        return names(*node.args[1:])
    if isinstance(node, ast.MatchClass):
        return names(node.cls)
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.Call) and names(node.left.func) == {"type"}:
        return names(*node.comparators)
    return set()


def ladders(source: str, known: set[str]) -> list[int]:
    """Lines that ask for a class."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if asked_of(node) & known]


def test_nobody_asks_for_the_class_of_a_grid():
    known = classes()
    assert {"IntegerSpec", "Nf4Grid", "BlockSpec", "Rounding", "Float8Spec"} <= known
    files = [file for file in SOURCE.rglob("*.py") if file.parent.name != "grids"]
    found = {str(file.relative_to(SOURCE)): lines for file in files if (lines := ladders(file.read_text(), known))}
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(a, grids.Nf4Spec)",
        "type(a) is Nf4Spec",
        "match a:\n  case Nf4Spec(): ...",
        "x = isinstance(a, Nf4Spec | int)",
    ],
)
def test_such_a_question_is_found(line):
    assert ladders(line, {"Nf4Spec"})


def test_a_method_declares_no_field_of_one_grid():
    own = {name for grid in grid_types().values() if grid.options for name in grid.options.model_fields}
    assert {"double_quant", "outliers", "gguf"} <= own < set(Method.model_fields)
    assert not own & (set(CommonOptions.__annotations__) | set(Method.__annotations__))
