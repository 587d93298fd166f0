"""The scripts and the notebook of `examples/`, run on the tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "first_steps.ipynb"


def ran(*arguments, **environment):
    """A finished Python of its own."""
    command = [sys.executable, *map(str, arguments)]
    given = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=given)


def code_cells():
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_every_example_is_run_here():
    tested = {"compress_and_evaluate.py", "gguf_files.py", "gate.py", NOTEBOOK.name, "README.md"}
    assert {file.name for file in EXAMPLES.iterdir() if file.is_file()} == tested


def test_compress_and_evaluate(tiny_model_dir, tmp_path):
    script = EXAMPLES / "compress_and_evaluate.py"
    done = ran(script, tiny_model_dir, tmp_path / "out", "--samples", 2, "--windows", 1)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[1:5]] == [f"layer {number}" for number in range(4)]
    assert "KL divergence 0." in lines[-1]


@pytest.mark.slow
def test_gguf_files(tiny_model_dir, tmp_path):
    script = EXAMPLES / "gguf_files.py"
    done = ran(script, tiny_model_dir, tmp_path, "Q8_0", "Q4_0", "--bpw", 6, "--samples", 2)
    assert (done.returncode, done.stderr) == (0, "")
    found = {file.name: file.stat().st_size for file in tmp_path.glob("*.gguf")}
    assert found["model-Q4_0.gguf"] < found["model-6bpw.gguf"] < found["model-Q8_0.gguf"]


def test_the_gate_opens_and_closes(tiny_model_dir, tmp_path):
    script = EXAMPLES / "gate.py"
    asked = (tiny_model_dir, tmp_path / "out", "--samples", 2, "--windows", 1)
    done = ran(script, *asked, "--kl", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the better one is " in done.stdout
    closed = ran(script, tiny_model_dir, tmp_path / "again", *asked[2:], "--kl", 0)
    assert closed.returncode == 3
    assert "the gate was kl > 0" in closed.stderr


def test_the_cells_of_the_notebook_run_in_order(tiny_model_dir, tmp_path):
    script = tmp_path / "cells.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in code_cells()))
    done = ran(script, MODEL=tiny_model_dir, OUTPUT=tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "steps:" in done.stdout


def test_the_notebook_is_kept_without_outputs():
    for number, cell in enumerate(code_cells()):
        assert (cell["outputs"], cell["execution_count"]) == ([], None), number


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.name)
def test_scripts_have_help(script):
    done = ran(script, "--help")
    assert done.returncode == 0
    assert "MODEL OUTPUT" in done.stdout
