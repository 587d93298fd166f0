"""How a matrix compares with plain rounding on the same grid, as its record says."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcompress.engine.run.rtn_ratio import against_rtn, output_energies
from llmcompress.grids.codebook import CodebookSpec
from llmcompress.grids.int8 import Int8Spec
from llmcompress.grids.integer import IntegerSpec
from llmcompress.grids.nf4 import Nf4Spec
from llmcompress.workers import SERIAL
from tinyruns import compress, recipe


def records(model, out, **options):
    return {linear["name"]: linear for linear in compress(model, out, recipe(**options))["linears"]}


def rounded(weight, bits, group):
    """Rounding to nearest in float64, codes -2^(b-1) ... 2^(b-1) - 1, the range as wide as the largest weight."""
    grouped = weight.double().reshape(weight.shape[0], -1, group)
    scale = grouped.abs().amax(-1, keepdim=True) * 2 / ((1 << bits) - 1)
    half = 1 << (bits - 1)
    return ((grouped / scale).round().clamp(-half, half - 1) * scale).reshape(weight.shape)


@pytest.mark.parametrize("width", [3, 512, 513, 1300])
def test_energies_are_those_of_the_outputs(width):
    generator = torch.Generator().manual_seed(0)
    rows, other = (torch.randn(7, width, generator=generator) for _ in range(2))
    inputs = torch.randn(50, width, generator=generator)
    found = output_energies((rows, other), inputs.T @ inputs, SERIAL)
    exact = [float((part.double() @ inputs.T.double()).square().sum()) for part in (rows, other)]
    assert found == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_ratio_is_that_of_the_losses(calibrated):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 64, generator=generator)
    delta = torch.randn(weight.shape, generator=generator) * 0.02
    inputs = torch.randn(200, 64, generator=generator)
    hessian = inputs.T @ inputs if calibrated else None
    plain = rounded(weight, 4, 32) - weight.double()
    ours, theirs = (
        float((rows.double() @ (inputs.T.double() if calibrated else torch.eye(64).double())).square().sum())
        for rows in (delta, plain)
    )
    found = against_rtn(weight, delta, IntegerSpec(4, 32), hessian, SERIAL)
    assert found == pytest.approx(ours / theirs, rel=5e-3)  # scales are stored in 16 bits


def test_plain_rounding_is_as_good_as_plain_rounding(tiny_model_dir, tmp_path):
    found = records(tiny_model_dir, tmp_path / "out", method="rtn", clip="minmax")
    assert all(linear["rtn_ratio"] == pytest.approx(1, abs=5e-3) for linear in found.values())


def test_gptq_is_better_than_plain_rounding(tiny_model_dir, tmp_path):
    found = records(tiny_model_dir, tmp_path / "out", method="gptq", qep_alpha=0.0)
    assert all(0 < linear["rtn_ratio"] < 0.8 for linear in found.values())


def test_grids_that_take_long_to_fit_or_keep_outliers_are_not_compared():
    assert IntegerSpec(4, 32).rounds_at_once
    assert Nf4Spec().rounds_at_once
    assert Int8Spec().rounds_at_once
    assert not Int8Spec(16).rounds_at_once
    assert not CodebookSpec(3).rounds_at_once


def test_a_matrix_without_error_has_no_ratio(tiny_model_dir, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model_dir.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    tensors[f"{name}.weight"] = torch.zeros_like(tensors[f"{name}.weight"])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    found = records(model, tmp_path / "out", method="rtn")
    assert found[name]["rtn_ratio"] is None
    assert found["model.layers.1.mlp.gate_proj"]["rtn_ratio"] < 1
