"""GPTQModel and its transformers, in an environment of their own: they clash with our dependencies.

It is the one that LLMCOMPRESS_GPTQMODEL_VENV names, else .venv-gptqmodel in the repository, which
scripts/interop/gptqmodel_env.sh makes.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "interop" / "gptqmodel_check.py"
IDS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(0))
TOLERANCE = {"float16": 2**-9, "bfloat16": 2**-6}  # of the largest logit: products are rounded in another order


def logits_of(paths, folder, loader="gptqmodel"):
    """Logits of `loader` by checkpoint, from one process for all; for those it could not load, the error as text."""
    venv = Path(os.environ.get("LLMCOMPRESS_GPTQMODEL_VENV", ROOT / ".venv-gptqmodel"))
    python = venv / "bin" / "python"
    if not python.exists():
        pytest.skip("no environment with GPTQModel: scripts/interop/gptqmodel_env.sh makes it")
    ids, found = folder / "ids.safetensors", folder / f"{loader}.safetensors"
    save_file({"input_ids": IDS}, ids)
    command = [python, SCRIPT, "--loader", loader, ids, found, *paths]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout.strip().splitlines()[-1])
    logits = load_file(found)
    return {path: errors.get(str(path), logits.get(str(path))) for path in paths}


def logits_of_dense(path):
    """Logits of a model directory of plain weights, here."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path).eval()(IDS).logits.float()
