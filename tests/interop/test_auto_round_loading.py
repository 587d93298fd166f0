"""transformers with auto-round reads our checkpoints on the CPU: every matrix multiplies by what we promised."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

import llmcompress

pytestmark = pytest.mark.interop

CASES = {
    "4 bits": {"bits": 4, "group_size": 32},
    "2 bits": {"bits": 2, "group_size": 32},
    "rows": {"bits": 8, "group_size": -1},
    "mixed": {
        "bits": 4,
        "group_size": 64,
        "set": {
            "mlp.down_proj": {"bits": 6},
            "mlp.[gu]*_proj": {"bits": 3, "group_size": 32},
            "self_attn.o_proj": {"bits": 5},
            "layers.1.mlp.down_proj": {"skip": True},
        },
    },
}
# what the package decodes lies in modules of its own; whatever multiplies the identity gives its weight
SCRIPT = """
import sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, device_map="cpu")
weights = {}
with torch.no_grad():
    for name, module in model.named_modules():
        if hasattr(module, "qweight"):
            found = module(torch.eye(module.infeatures, dtype=torch.bfloat16))
            weights[f"{name}.weight"] = found.T.float().contiguous()
save_file(weights, sys.argv[2])
"""


@pytest.mark.parametrize("name", CASES)
def test_every_matrix_is_what_its_codes_say(name, tiny_model_dir, tmp_path):
    options = CASES[name]
    for form in ("auto-round", "dense"):
        llmcompress.compress(tiny_model_dir, method="rtn", output=tmp_path / form, format=form, **options)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, tmp_path / "auto-round", tmp_path / "read.safetensors"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    read, dense = load_file(tmp_path / "read.safetensors"), load_file(tmp_path / "dense" / "model.safetensors")
    records = json.loads((tmp_path / "auto-round" / "report.json").read_text())["linears"]
    assert read.keys() == {f"{record['name']}.weight" for record in records}
    for module, found in read.items():
        ours = dense[module].float()
        assert ((found - ours).abs() <= 2**-7 * ours.abs()).all(), module  # two roundings to bfloat16
