"""vLLM for CPUs in an environment of its own, which clashes with our dependencies.

It is the one that LLMCOMPRESS_VLLM_VENV names, else .venv-vllm in the repository, which scripts/interop/vllm_env.sh
makes.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "interop" / "vllm_check.py"
IDS = torch.randint(5, 96, (2, 40), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Found:
    """What vLLM made of a checkpoint. values: logarithms of probabilities [samples, length - 1, vocabulary].

    error: what it said, empty where it ran the checkpoint. verdicts: by kernel of GPUs, its answers.
    """

    values: torch.Tensor | None
    error: str
    verdicts: dict[str, list[str]]


def found_by_vllm(paths, folder, ids=IDS, plain=False):
    """What vLLM makes of each checkpoint, in one process. plain: without stand-ins for kernels that a CPU lacks."""
    venv = Path(os.environ.get("LLMCOMPRESS_VLLM_VENV", ROOT / ".venv-vllm"))
    python = venv / "bin" / "python"
    if not python.exists():
        pytest.skip("no environment with vLLM: scripts/interop/vllm_env.sh makes it")
    given, found = folder / "ids.safetensors", folder / "found.safetensors"
    save_file({"input_ids": ids}, given)
    command = [python, SCRIPT, *(["--plain"] if plain else []), given, found, *paths]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    values = load_file(found)
    return {
        path: Found(values.get(str(path)), said["errors"].get(str(path), ""), said["verdicts"][str(path)])
        for path in paths
    }
