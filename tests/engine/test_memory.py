"""The plan's memory is a contract: within 10% of what is measured, and a limit is kept."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from madetokenizers import byte_level, save

WIDTHS = {  # hidden, feed-forward, heads, key-value heads, vocabulary
    "small": (256, 704, 4, 2, 8192),
    "smollm2": (576, 1536, 9, 3, 49152),
    "wide": (1024, 2816, 16, 4, 32000),
}
IDS = "token ids of the model"
CALIBRATED = ["--calibration", IDS, "--samples", "20", "--length", "512"]
GROUPS = ["--group-size", "64", *CALIBRATED]
RECIPES = {  # each with a number of threads
    "gptq": (2, ["gptq", *GROUPS]),
    "symmetric calibration, 3 bits": (1, ["gptq", *GROUPS, "--bits", "3", "--qep-alpha", "0", "--format", "gptq"]),
    "plain, group order": (2, ["gptq", *GROUPS, "--descent", "0", "--actorder", "group", "--format", "gptq"]),
    "rtn": (1, ["rtn", *GROUPS]),
    "rtn by outputs, awq": (1, ["rtn", *GROUPS, "--clip", "output", "--asym", "--format", "awq"]),
    "rtn, scales of keys and values": (1, ["rtn", *GROUPS, "--kv-cache", "fp8"]),
    "awq": (2, ["awq", *GROUPS]),
    "rotate": (1, ["rotate"]),
    "gguf": (2, ["gguf", "--type", "Q4_K_M"]),
    "gguf, calibrated": (2, ["gguf", "--type", "Q4_K_M", *CALIBRATED]),
}
KINDS = ("*.safetensors", "*.safetensors.index.json", "*.gguf")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three random models of real widths and two layers, and token ids for each."""
    folder = tmp_path_factory.mktemp("models")
    return {name: write(folder / name, *widths) for name, widths in WIDTHS.items()}


def write(path, hidden, inner, heads, pairs, vocabulary, layers=2):
    path.mkdir()
    generator = torch.Generator().manual_seed(hidden)
    dim = hidden // heads
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for number in range(layers):
        below = f"model.layers.{number}"
        shapes |= {f"{below}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{below}.self_attn.{n}_proj.weight": (dim * pairs, hidden) for n in "kv"}
        shapes |= {f"{below}.self_attn.{n}_proj.weight": (hidden, hidden) for n in "qo"}
        shapes |= {f"{below}.mlp.{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
        shapes[f"{below}.mlp.down_proj.weight"] = (hidden, inner)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * hidden**-0.5
        for name, shape in shapes.items()
    }
    save_file({name: t.to(torch.bfloat16) for name, t in tensors.items()}, path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": pairs,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    save(byte_level(), path)
    ids = torch.randint(0, vocabulary, (20, 512), generator=generator)
    save_file({"input_ids": ids}, path.with_suffix(".ids.safetensors"))
    return path


def call(*arguments):
    """The command line as a user has it, in whose environment nothing says how many threads a library may start."""
    command = [sys.executable, "-m", "llmcompress", *map(str, arguments), "--json"]
    environment = {key: value for key, value in os.environ.items() if key not in THREADS}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def arguments_for(model, recipe, *more):
    ids = str(model.with_suffix(".ids.safetensors"))
    return [*(ids if word == IDS else word for word in recipe), model, *more]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", WIDTHS)
def test_peak_memory_is_within_a_tenth_of_the_plan(models, tmp_path, name, recipe):
    threads, command = RECIPES[recipe]
    arguments = arguments_for(models[name], command, "--threads", threads, "-o", tmp_path / "out")
    planned = json.loads(call("plan", *arguments).stdout)
    done = call(*arguments)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)["peak_memory_bytes"]
    assert planned["memory_bytes"] == pytest.approx(measured, rel=0.1)
    weights = sum(file.stat().st_size for kind in KINDS for file in (tmp_path / "out").glob(kind))
    assert planned["output_bytes"] == weights


@pytest.mark.slow
def test_a_limit_is_kept_by_fewer_threads_and_smaller_batches(models, tmp_path):
    arguments = arguments_for(models["smollm2"], ["gptq", *GROUPS], "-o", tmp_path / "out", "--batch", 8)
    free = json.loads(call("plan", *arguments, "--threads", 4).stdout)["memory_bytes"]
    arguments = arguments_for(models["smollm2"], ["gptq", *GROUPS], "-o", tmp_path / "out")
    limit = 0.69e9
    assert free > limit
    planned = json.loads(call("plan", *arguments, "--max-memory", limit / 1e9).stdout)
    assert planned["memory_bytes"] <= limit
    done = call(*arguments, "--max-memory", limit / 1e9)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_memory_bytes"] <= limit


def test_too_little_memory_is_refused_at_once(tiny_model_dir, tmp_path):
    done = call("gptq", tiny_model_dir, "-o", tmp_path / "out", "--max-memory", "0.1", "--samples", 4, "--length", 32)
    assert done.returncode == 2
    assert "--max-memory allows 0.10" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 2
    assert list(tmp_path.iterdir()) == []
