"""Imports run one way, and what must start fast does not import torch."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "llmcompress"
ROW = [
    {
        "errors",
        "extras",
        "lazy",
        "registry",
        "ledger",
        "hardware",
        "scripted",
        "workers",
        "background",
        "yamlfile",
        "npzfile",
        "isolation",
        "significant",
        "mkl",
    },
    {"stats", "grids", "packing"},
    {"arch"},
    {"solve", "methods", "pruners", "transforms"},
    {"formats", "store", "calib"},
    {"model", "recipe"},
    {"engine"},
    {"kernels"},
    {"validate"},
    {"report"},
    {"api"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(ROW) for name in names}
PHASES = [
    {"process", "source", "targets"},
    {"train"},
    {"plan"},
    {"run"},
    {"write"},
    {"execute"},
    {"structure", "budget", "export_checkpoint"},
    {"recover"},
    {"draft"},
]
PHASE_RANK = {name: rank for rank, names in enumerate(PHASES) for name in names}


def imports(file: Path):
    """(package imported, line) of every import of our own, wherever it stands."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("llmcompress."):
            yield node.module.split(".")[1], node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("llmcompress."):
                    yield alias.name.split(".")[1], node.lineno


def files():
    return [file for file in SOURCE.rglob("*.py") if file.parent != SOURCE or file.stem in RANK]


def test_every_package_has_its_place_in_the_row():
    present = {path.stem if path.suffix else path.name for path in SOURCE.iterdir() if not path.name.startswith("_")}
    assert present - {"py", "py.typed", "calib_data", "eval_data", "configs"} == set(RANK)


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_go_left(file):
    own = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    wrong = [(name, line) for name, line in imports(file) if name != own and RANK[name] > RANK[own]]
    assert not wrong
    if own != "cli":
        assert "rich" not in {node.split(".")[0] for node in plain_imports(file)}
        assert "print" not in {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}


def plain_imports(file: Path):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@cache
def graph():
    """The modules that each module imports, wherever an import stands, for annotations alone too."""
    files = {module_of(file): file for file in SOURCE.rglob("*.py")}
    found = {}
    for name, file in files.items():
        targets = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= (inner & files.keys()) or {node.module}
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
        found[name] = (targets & files.keys()) - {name, "llmcompress"}  # which all import for the version
    return found


def module_of(file):
    parts = ("llmcompress", *file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(arrows):
    """Sets of nodes that reach each other (strongly connected components, R. Tarjan 1972), of two nodes or more."""
    order, low, stack, found = {}, {}, [], []

    def visit(node):
        order[node] = low[node] = len(order)
        stack.append(node)
        for target in arrows[node]:
            if target not in order:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == order[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for node in arrows:
        if node not in order:
            visit(node)
    return found


def test_circles_are_found():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"e"}, "e": {"f"}, "f": {"d"}, "g": {"a"}}
    assert sorted(circles(arrows)) == [["b", "c"], ["d", "e", "f"]]
    assert "llmcompress.engine.plan.plan" in graph()["llmcompress.engine.plan.make_plan"]


def test_no_modules_import_each_other_in_a_circle():
    assert circles(graph()) == []


def test_phases_of_the_engine_import_earlier_phases_only():
    prefix = "llmcompress.engine."
    assert {name.removeprefix(prefix).split(".")[0] for name in graph() if name.startswith(prefix)} == set(PHASE_RANK)
    upward = set()
    for name, targets in graph().items():
        for target in targets:
            if name.startswith(prefix) and target.startswith(prefix):
                own, (other, *_) = name.split(".")[2], target.split(".")[2:]
                if own != other and PHASE_RANK[other] >= PHASE_RANK[own]:
                    upward.add((own, target.removeprefix(prefix)))
    assert upward == set()


@pytest.mark.parametrize("arguments", [["--help"], ["gptq", "--help"], ["list", "methods"], ["inspect", "MODEL"]])
def test_help_and_inspect_do_without_torch(arguments, tiny_model_dir):
    arguments = [str(tiny_model_dir) if item == "MODEL" else item for item in arguments]
    code = (
        "import sys; from llmcompress.cli import app\n"
        f"sys.argv = ['llmcompress', *{arguments!r}]\n"
        "try: app.main()\nexcept SystemExit: pass\n"
        "slow = {'torch', 'transformers'} | ({'numpy'} if '--help' in sys.argv else set())\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def ambient(tree: ast.Module):
    """Lines of state that calls share without passing it: context variables, `global`, containers that start empty."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = [getattr(node, "module", None), *(alias.name for alias in node.names)]
            if {"contextvars", "ContextVar", "local"} & set(names):
                yield node.lineno
        elif isinstance(node, ast.Global):
            yield node.lineno
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if value is not None and (
            (isinstance(value, ast.Call) and getattr(value.func, "id", "") in CONTAINERS)
            or (isinstance(value, ast.List) and not value.elts)
            or (isinstance(value, ast.Dict) and not value.keys)
        ):
            yield node.lineno


CONTAINERS = {"list", "set", "deque", "defaultdict", "OrderedDict"}
OF_THE_PROCESS = {"cli/app.py", "cli/console.py"}  # its commands, and where its stdout went


def test_no_module_has_state_of_its_own():
    found = {str(file.relative_to(SOURCE)): list(ambient(ast.parse(file.read_text()))) for file in SOURCE.rglob("*.py")}
    assert {file for file, lines in found.items() if lines} == OF_THE_PROCESS


@pytest.mark.parametrize(
    "source",
    [
        "from contextvars import ContextVar\n",
        "import contextvars\n",
        "from threading import local\n",
        "seen = {}\n",
        "seen: list[int] = []\n",
        "seen = set()\n",
        "N = 0\ndef f():\n    global N\n    N += 1\n",
    ],
)
def test_state_of_a_module_is_found(source):
    assert list(ambient(ast.parse(source)))
