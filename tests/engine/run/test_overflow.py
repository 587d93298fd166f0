"""A model that overflows is not compressed on what is left of its text, and a config that makes it so is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcompress.engine.run.overflow import refuse_overflow
from llmcompress.errors import RunError
from llmcompress.stats.absmax import AbsMax
from llmcompress.stats.energy import Energy, energy
from llmcompress.stats.gram import Gram
from llmcompress.workers import SERIAL

TEXT = ["--samples", 2, "--length", 16, "-q"]
INTO_64 = ["--group-size", 64]


@pytest.fixture(scope="module")
def overflowing(tiny_model_dir, tmp_path_factory):
    """A model whose layers overflow in float16, and in no other type."""
    folder = shutil.copytree(tiny_model_dir, tmp_path_factory.mktemp("overflowing") / "model")
    tensors = load_file(folder / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.1.mlp.{name}.weight"] *= 1000
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["gptq", "--bits", 4, *INTO_64], "out"),
        (["awq", *INTO_64], "out"),
        (["wanda", "--sparsity", 0.5, "--allocation", "owl"], "out"),
        (["fp8", "--activations", "fp8-tensor"], "out"),
        (["width", "--ffn", 256], "out"),
        (["imatrix"], "out.gguf"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_it_ends_before_anything_is_published(command, name, main, capsys, overflowing, tmp_path):
    words = [command[0], overflowing, "-o", tmp_path / name, *command[1:], *TEXT]
    assert main(*words, "--compute-dtype", "float16") == 1
    error = capsys.readouterr().err
    assert "32 of 32 tokens that enter" in error or "30 of 30 tokens that enter" in error
    assert "hint: use --compute-dtype float32 or bfloat16" in error
    assert not (tmp_path / name).exists()


def test_another_type_goes_on_with_the_work(main, overflowing, tmp_path):
    assert main("wanda", overflowing, "-o", tmp_path / "out", "--sparsity", 0.5, *TEXT) == 0


def gram(x):
    found = Gram(x.shape[-1], SERIAL)
    found.update(x)
    return found


def test_half_of_the_tokens_have_to_be_left():
    x = torch.ones(4, 8)
    x[:2, 3] = float("nan")
    ranges = AbsMax(8)
    ranges.update(x)
    refuse_overflow("m", [gram(x), energy(x), ranges], torch.float16)
    x[2, 0] = float("inf")
    ranges.update(x[1:])
    for found in (gram(x), energy(x), ranges):
        with pytest.raises(RunError, match="tokens that enter m are not finite"):
            refuse_overflow("m", [found], torch.float16)
    refuse_overflow("m", [Energy.none(8)], torch.float16, routed=True)  # an expert to which no token was sent
    with pytest.raises(RunError, match="0 of 0 tokens"):
        refuse_overflow("m", [Energy.none(8)], torch.float16)


@pytest.mark.parametrize(("value", "words"), [(1e25, "too large to be squared"), (0.0, "zero for every token")])
def test_what_cannot_be_squared_says_nothing(value, words):
    for found in (gram(torch.full((4, 8), value)), energy(torch.full((4, 8), min(value, 1e16)))):
        with pytest.raises(RunError, match=words):
            refuse_overflow("m", [found], torch.float32)


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": float("inf")},
        {"rms_norm_eps": 0},
        {"rms_norm_eps": -1e-6},
        {"rms_norm_eps": {"__float__": "NaN"}},
        {"rms_norm_eps": "NaN"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -2.0}},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [0.0] * 32}},
        {"anything": [1, {"else": float("-inf")}]},
    ],
    ids=str,
)
def test_a_config_with_which_no_text_can_run_is_refused_in_the_plan(changes, main, capsys, tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    for command in (["plan", "gptq", folder, *INTO_64], ["depth", folder, "--drop", 1, "--dry-run"]):
        assert main(*command) == 2
        assert "with which no text can run" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"time_step_limit": [0.0, float("inf")]}, {"layer_rope_theta": [1e4, 0.0]}])
def test_what_is_infinite_or_zero_as_it_is_published_is_not(changes, main, tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    assert main("plan", "rtn", folder, *INTO_64) == 0
