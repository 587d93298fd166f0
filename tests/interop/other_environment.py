"""A loader that clashes with our dependencies, run in an environment of its own."""

import json
import os
import subprocess
from pathlib import Path
from tempfile import mkdtemp

import pytest
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]


def asked(name, ids, folder, paths, arguments=(), timeout=800):
    """What scripts/interop/NAME_check.py, for all checkpoints in one process, says in its last line; its tensors."""
    place = Path(mkdtemp(dir=folder))  # one for each call: tensors that were loaded may still map their file
    given, found = place / "ids.safetensors", place / "found.safetensors"
    save_file({"input_ids": ids}, given)
    return told(name, folder, [*arguments, given, found, *paths], timeout), load_file(found)


def python_of(name):
    """The Python of the environment that LLMCOMPRESS_NAME_VENV names, else of .venv-NAME in the repository.

    scripts/interop/NAME_env.sh makes the latter; the test is skipped where there is none.
    """
    given, made = os.environ.get(f"LLMCOMPRESS_{name.upper()}_VENV"), ROOT / f".venv-{name}"
    python = Path(given or made) / "bin" / "python"
    if not given and not (made / "installed").exists():
        pytest.skip(f"no environment with {name}: scripts/interop/{name}_env.sh makes it")
    return python


def told(name, folder, arguments, timeout=800):
    """What scripts/interop/NAME_check.py says in its last line."""
    command = [python_of(name), ROOT / "scripts" / "interop" / f"{name}_check.py", *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
