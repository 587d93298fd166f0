"""Blocks of 8-bit floats from a run to the second reader: values, rounded inputs, and damage that shows."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcompress.validate.evaluate import measure
from llmcompress.validate.load import open_streamed
from llmcompress.validate.verify import passed, verify
from tinyruns import carry_out

IDS = torch.randint(3, 1000, (4, 32), generator=torch.Generator().manual_seed(0))
ROUNDED = {"type": "fp8-block", "activations": "fp8-group"}


def divergence(out, model):
    return float(measure(*(open_streamed(path, dtype=torch.float32) for path in (out, model)), IDS).kl.mean())


@pytest.fixture(scope="module")
def outs(shallow_model_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("blocks")
    for name, format_, options in (
        ("weights", "compressed-tensors", {"type": "fp8-block"}),
        ("compressed-tensors", "compressed-tensors", ROUNDED),
        ("fp8", "fp8", ROUNDED),
        ("modelopt", "modelopt", {"type": "nvfp4", "activations": "nvfp4"}),
        ("nvfp4", "compressed-tensors", {"type": "nvfp4", "activations": "nvfp4"}),
    ):
        carry_out(shallow_model_dir, root / name, [{"method": "rtn", **options}], format_)
    return root


def test_both_formats_verify_and_compute_the_same_with_rounded_inputs(outs, shallow_model_dir):
    for name in ("weights", "compressed-tensors", "fp8"):
        checks = verify(outs / name, shallow_model_dir)
        assert passed(checks), [check for check in checks if not check.ok]
    weights, packed, vendors = (
        divergence(outs / name, shallow_model_dir) for name in ("weights", "compressed-tensors", "fp8")
    )
    assert packed == vendors
    assert packed > 1.2 * weights > 0


def test_modelopt_holds_what_compressed_tensors_holds_with_rounded_inputs(outs, shallow_model_dir):
    for name in ("modelopt", "nvfp4"):
        checks = verify(outs / name, shallow_model_dir)
        assert passed(checks), [check for check in checks if not check.ok]
    ours, other = (divergence(outs / name, shallow_model_dir) for name in ("modelopt", "nvfp4"))
    assert ours == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize(
    ("form", "part", "change"),
    [
        ("fp8", "weight_scale_inv", lambda t: t * 2),
        ("fp8", "weight_scale_inv", lambda t: t * 0),
        ("fp8", "weight_scale_inv", lambda t: t.to(torch.bfloat16)),
        ("fp8", "weight", lambda t: (t.view(torch.uint8) | 0x7F).view(torch.float8_e4m3fn)),
        ("modelopt", "weight_scale_2", lambda t: t * 2),
        ("modelopt", "input_scale", lambda t: t * 2),
        ("modelopt", "weight_scale", lambda t: (t.view(torch.uint8) * 0).view(torch.float8_e4m3fn)),
        ("compressed-tensors", "weight_scale", lambda t: t.repeat(2, 1)),
        ("compressed-tensors", "weight_scale", lambda t: t * 2),
    ],
)
def test_damage_shows(outs, shallow_model_dir, tmp_path, form, part, change):

    out = shutil.copytree(outs / form, tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{part}"
    tensors[name] = change(tensors[name])
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert not passed(verify(out, shallow_model_dir))


@pytest.mark.parametrize(
    ("key", "value"),
    [("weight_block_size", [64, 128]), ("activation_scheme", "static"), ("modules_to_not_convert", [])],
)
def test_a_config_that_says_something_else_shows(outs, shallow_model_dir, tmp_path, key, value):

    out = shutil.copytree(outs / "fp8", tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"][key] = value
    (out / "config.json").write_text(json.dumps(config))
    assert not passed(verify(out, shallow_model_dir))
