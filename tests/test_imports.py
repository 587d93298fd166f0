"""Imports run one way, and what must start fast does not import torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "llmcompress"
ROW = [
    {"errors", "registry", "ledger", "hardware", "parallel", "processes", "yamlfile"},
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


@pytest.mark.parametrize("arguments", [["--help"], ["gptq", "--help"], ["list", "methods"], ["inspect", "MODEL"]])
def test_help_and_inspect_do_without_torch(arguments, tiny_model_dir):
    arguments = [str(tiny_model_dir) if item == "MODEL" else item for item in arguments]
    code = (
        "import sys; from llmcompress.cli import app\n"
        f"sys.argv = ['llmcompress', *{arguments!r}]\n"
        "try: app.main()\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules, 'slow start'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
