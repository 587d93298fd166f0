"""GPTQModel reads our gptq and awq checkpoints on the CPU, transformers the awq ones, and both compute what we promised.

It clashes with our dependencies, so it runs in an environment of its own: the one that LLMCOMPRESS_GPTQMODEL_VENV
names, else .venv-gptqmodel in the repository, which scripts/interop/gptqmodel_env.sh makes.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "interop" / "gptqmodel_check.py"
W4 = {"bits": 4, "group_size": 32}
ASYM = {**W4, "sym": False}
CASES = {
    "w4": ("llama", "float16", W4),
    "w4 bfloat16": ("llama", "bfloat16", {"bits": 4, "group_size": 128}),
    "w4 asymmetric": ("llama", "float16", {**W4, "sym": False}),
    "w2": ("llama", "float16", {"bits": 2, "group_size": 32}),
    "w2 asymmetric": ("llama", "bfloat16", {"bits": 2, "group_size": 32, "sym": False}),
    "w3": ("llama", "float16", {"bits": 3, "group_size": 64}),
    "w3 asymmetric": ("llama", "float16", {"bits": 3, "group_size": 64, "sym": False}),
    "w8 by rows": ("llama", "float16", {"bits": 8, "group_size": -1}),
    "own settings": ("llama", "float16", {**W4, "set": {"mlp.down_proj": {"bits": 8, "group_size": 64}}}),
    "skipped": (
        "llama",
        "float16",
        {**W4, "set": {"layers.1.mlp.*": {"skip": True}, "layers.0.*.q_proj": {"skip": True}}},
    ),
    "permuted groups": ("llama", "float16", {**W4, "method": "gptq", "actorder": "group"}),
    "static groups": ("llama", "float16", {**W4, "method": "gptq", "actorder": "static"}),
    "qwen2": ("qwen2", "bfloat16", {"bits": 4, "group_size": 64}),
    "qwen2 w8": ("qwen2", "float16", {"bits": 8, "group_size": 64}),
    "qwen3_moe": ("qwen3_moe", "bfloat16", W4),
    "gpt2": ("gpt2", "float16", W4),
    "gemma2": ("gemma2", "bfloat16", W4),
}


@pytest.fixture(scope="session")
def gptqmodel_python():
    """The interpreter of an environment that has GPTQModel."""
    venv = Path(os.environ.get("LLMCOMPRESS_GPTQMODEL_VENV", ROOT / ".venv-gptqmodel"))
    python = venv / "bin" / "python"
    if not python.exists():
        pytest.skip("no environment with GPTQModel: scripts/interop/gptqmodel_env.sh makes it")
    return python


@pytest.fixture(scope="session")
def ids():
    return torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def gptqmodel_logits(gptqmodel_python, compress, ids, tmp_path_factory):
    """Logits of GPTQModel by case, from one process for all, and the errors of those it could not load."""
    folder = tmp_path_factory.mktemp("gptqmodel")
    save_file({"input_ids": ids}, folder / "ids.safetensors")
    paths = {name: str(compress(family, dtype, "gptq", **options)) for name, (family, dtype, options) in CASES.items()}
    command = [gptqmodel_python, SCRIPT, folder / "ids.safetensors", folder / "logits.safetensors", *paths.values()]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout.strip().splitlines()[-1])
    logits = load_file(folder / "logits.safetensors")
    return {name: errors[path] if path in errors else logits[path] for name, path in paths.items()}


@pytest.mark.parametrize("name", CASES)
def test_gptqmodel_computes_what_the_decoded_weights_give(gptqmodel_logits, compress, ids, name):
    from transformers import AutoModelForCausalLM

    family, dtype, options = CASES[name]
    theirs = gptqmodel_logits[name]
    assert not isinstance(theirs, str), theirs
    dense = AutoModelForCausalLM.from_pretrained(compress(family, dtype, "dense", **options)).eval()
    with torch.no_grad():
        ours = dense(ids).logits.float()
    original = AutoModelForCausalLM.from_pretrained(compress(family, dtype, "dense", bits=8, group_size=32)).eval()
    with torch.no_grad():
        unlike = original(ids).logits.float()
    scale = ours.abs().max()
    # products are rounded in another order; measured: at most 0.6 of this
    tolerance = {"float16": 2**-9, "bfloat16": 2**-6}[dtype] * scale
    assert (theirs - ours).abs().max() <= tolerance
    if options["bits"] < 8:  # other codes would be noticed
        assert (unlike - ours).abs().max() > 2 * tolerance
