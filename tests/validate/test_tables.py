"""The independent reader on NF4, int8, codebooks and qoq: what was written passes, every planted damage is found."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.recipe import parse
from llmcompress.validate.stored import read_tensors
from llmcompress.validate.verify import verify

MODULE = "model.layers.0.self_attn.k_proj"
IDS = torch.randint(0, 96, (8, 32), generator=torch.Generator().manual_seed(1))
CASES = {
    "nf4": ("bitsandbytes", {"type": "nf4"}),
    "nf4 plain": ("bitsandbytes", {"type": "nf4", "double_quant": False}),
    "int8": ("bitsandbytes", {"type": "int8", "bits": 8}),
    "codebook": ("codebook", {"type": "codebook", "bits": 3}),
    "outliers": ("int8-outliers", {"type": "int8", "bits": 8, "outliers": "topk", "outlier_count": 3}),
    "progressive": ("qoq", {"type": "progressive", "group_size": 32, "activations": "int8-token"}),
    "dense": ("dense", {"type": "nf4"}),
    "dense progressive": ("dense", {"type": "progressive", "group_size": 32}),
}


@pytest.fixture(scope="module")
def source(random_model_dir):
    return random_model_dir("llama", intermediate_size=128)


@pytest.fixture(scope="module")
def outputs(source, tmp_path_factory):
    root = tmp_path_factory.mktemp("tables")
    save_file({"input_ids": IDS}, root / "ids.safetensors")
    calibration = {"source": str(root / "ids.safetensors"), "samples": 8, "length": 32}
    for name, (format_, options) in CASES.items():
        recipe = {"calibration": calibration, "steps": [{"method": "rtn", **options}], "output": {"format": format_}}
        run(make_plan(parse(recipe), source, Options(out=root / name)))
    return root


def failures(out, source=None):
    return {check.name: check.detail for check in verify(out, source) if not check.ok}


def damaged(out, copy, change):
    """A copy whose tensors `change` has been at, with hashes renewed as a faulty writer would have them."""
    shutil.copytree(out, copy)
    tensors = {name: tensor.clone() for name, tensor in load_file(copy / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    report = json.loads((copy / "report.json").read_text())
    report["tensors"] = {name: tensor.sha256() for name, tensor in read_tensors(copy).items()}
    (copy / "report.json").write_text(json.dumps(report))
    return copy


@pytest.mark.parametrize("name", CASES)
def test_what_was_written_passes(outputs, source, name):
    assert failures(outputs / name, source) == {}


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][0] != "dense"])
def test_a_part_that_is_missing_is_found(outputs, source, tmp_path, name):
    parts = [part for part in load_file(outputs / name / "model.safetensors") if part.startswith(f"{MODULE}.")]
    assert len(parts) >= 3
    for number, part in enumerate(parts):
        assert failures(damaged(outputs / name, tmp_path / str(number), lambda tensors: tensors.pop(part)), source)  # noqa: B023


def _swap(part, change):
    def go(tensors):
        tensors[f"{MODULE}.{part}"] = change(tensors[f"{MODULE}.{part}"])

    return go


def _set(place, value):
    def change(tensor):
        tensor.view(-1)[place] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("name", "part", "change", "check"),
    [
        ("nf4", "weight", lambda t: t ^ 1, "bound"),  # the low code of every pair one off
        ("nf4", "weight.quant_map", _set(3, 0.5), "matrices"),
        ("nf4", "weight.nested_quant_map", _set(9, 0.5), "matrices"),
        ("nf4", "weight.nested_absmax", _set(0, float("nan")), "matrices"),
        ("nf4", "weight.absmax", lambda t: t.flip(0), "bound"),
        ("nf4", "weight.absmax", lambda t: t[:-1], "matrices"),
        ("nf4 plain", "weight.absmax", _set(1, 9.0), "bound"),
        ("int8", "weight", _set(7, -128), "matrices"),
        ("int8", "weight_format", lambda t: t + 1, "matrices"),
        ("int8", "SCB", lambda t: -t, "matrices"),
        ("int8", "SCB", lambda t: t * 1.01, "bound"),
        ("codebook", "codebook", lambda t: t.flip(1), "matrices"),
        ("codebook", "weight_packed", lambda t: t ^ 1, "bound"),
        ("outliers", "outlier_index", lambda t: t.flip(0), "matrices"),
        ("outliers", "outlier_weight", lambda t: t * 1.01, "bound"),
        ("outliers", "outlier_index", lambda t: t + 1000, "matrices"),
        ("progressive", "qweight", lambda t: t ^ 1, "bound"),
        ("progressive", "qweight", lambda t: t.flip(1), "bound"),
        ("progressive", "scale_group", lambda t: t % 16 + 1, "bound"),
        ("progressive", "scale_group", _set(3, 0), "matrices"),
        ("progressive", "scale_group", _set(3, 17), "matrices"),
        ("progressive", "scale_group", lambda t: t * 0 + 16, "matrices"),  # int8 overflows
        ("progressive", "zero_group", _set(0, 16), "matrices"),
        ("progressive", "zero_group", lambda t: t ^ 1, "bound"),
        ("progressive", "scale_row", _set(2, float("nan")), "matrices"),
        ("progressive", "scale_row", lambda t: -t, "matrices"),
        ("progressive", "scale_row", lambda t: t[:-1], "matrices"),
    ],
)
def test_damage_of_meaning_is_found(outputs, source, tmp_path, name, part, change, check):
    assert check in failures(damaged(outputs / name, tmp_path / "copy", _swap(part, change)), source)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("nf4", lambda settings: settings.pop("llm_int8_skip_modules")),
        ("nf4", lambda settings: settings.update(llm_int8_skip_modules=[])),
        ("nf4", lambda settings: settings.update(bnb_4bit_use_double_quant=False)),
        ("nf4", lambda settings: settings.update(load_in_8bit=True)),
        ("nf4", lambda settings: settings.update(bnb_4bit_quant_type="fp4")),
        ("int8", lambda settings: settings.update(llm_int8_skip_modules=["lm_head", MODULE])),
        ("codebook", lambda settings: settings["modules"].pop(MODULE)),
        ("codebook", lambda settings: settings["modules"].update({MODULE: 4})),
        ("outliers", lambda settings: settings.pop("modules")),
        ("progressive", lambda settings: settings["modules"].pop(MODULE)),
        ("progressive", lambda settings: settings["modules"][MODULE].update(group_size=64)),
        ("progressive", lambda settings: settings["modules"][MODULE].update(inputs=None)),
        ("progressive", lambda settings: settings["modules"][MODULE].update(inputs="int8-tensor")),
        ("progressive", lambda settings: settings["modules"].update({MODULE: 4})),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_found(outputs, tmp_path, name, change):
    copy = tmp_path / "copy"
    shutil.copytree(outputs / name, copy)
    config = json.loads((copy / "config.json").read_text())
    change(config["quantization_config"])
    (copy / "config.json").write_text(json.dumps(config))
    assert failures(copy)
