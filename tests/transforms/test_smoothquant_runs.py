"""SmoothQuant where it matters: on a model with planted outliers, naive 8 bits collapse and smoothed ones do not."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import RecipeError
from llmcompress.recipe import parse
from llmcompress.validate.evaluate import measure
from llmcompress.validate.load import open_streamed
from llmcompress.validate.verify import passed, verify

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from planted import plant

W8A8 = {"method": "rtn", "bits": 8, "group_size": -1, "activations": "int8-token"}


@pytest.fixture(scope="module")
def planted(tiny_model_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("planted") / "model"
    plant(tiny_model_dir, out, 2, 100.0)
    return out


@pytest.fixture(scope="module")
def windows(held_out_ids):
    return held_out_ids[: 24 * 64].view(24, 64)


def perplexities(subject, reference, windows):
    seen = measure(*(open_streamed(path, dtype=torch.float32) for path in (subject, reference)), windows)
    return float(torch.tensor(seen.nll).mean().exp()), float(torch.tensor(seen.ref_nll).mean().exp())


def made(model, out, *steps):
    data = {"calibration": {"samples": 16, "length": 64}, "steps": [*steps, W8A8]}
    run(make_plan(parse(data), model, Options(out=out)))
    return out


def test_planting_outliers_leaves_the_function_as_it_was(planted, tiny_model_dir, windows):
    mine, theirs = perplexities(planted, tiny_model_dir, windows)
    assert mine == pytest.approx(theirs, rel=1e-5)


def test_naive_8_bits_collapse_where_smoothed_ones_stay_within_two_per_cent(planted, tmp_path, windows):
    naive, original = perplexities(made(planted, tmp_path / "naive"), planted, windows)
    smooth, _ = perplexities(made(planted, tmp_path / "smooth", {"method": "smoothquant"}), planted, windows)
    assert naive > 1.2 * original
    assert smooth < 1.02 * original


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_searched_strength_is_better_than_either_extreme(planted, tmp_path, windows, alpha):
    step = {"method": "smoothquant"}
    searched = measured_kl(made(planted, tmp_path / "searched", step), planted, windows)
    extreme = measured_kl(made(planted, tmp_path / "extreme", {**step, "alpha": alpha}), planted, windows)
    assert searched < extreme


def measured_kl(subject, reference, windows):
    models = [open_streamed(path, dtype=torch.float32) for path in (subject, reference)]
    return float(measure(*models, windows).kl.mean())


@pytest.mark.parametrize(
    ("activations", "bound"), [("int8-token", 0.01), ("int8-tensor", 0.1)], ids=["O1 of the paper", "O3 of the paper"]
)
def test_one_scale_for_a_matrix_costs_more_than_one_per_row(tiny_model_dir, tmp_path, windows, activations, bound):
    losses = []
    for per_tensor in (False, True):
        step = {**W8A8, "activations": activations, "per_tensor": per_tensor}
        data = {"calibration": {"samples": 16, "length": 64}, "steps": [{"method": "smoothquant"}, step]}
        out = tmp_path / f"out-{per_tensor}"
        run(make_plan(parse(data), tiny_model_dir, Options(out=out)))
        assert passed(verify(out, tiny_model_dir))
        losses.append(measured_kl(out, tiny_model_dir, windows))
    scales = [tensor for name, tensor in load_file(out / "model.safetensors").items() if name.endswith("weight_scale")]
    assert scales
    assert all(len(scale.unique()) == 1 for scale in scales)
    assert losses[0] < losses[1] < bound


@pytest.mark.parametrize(
    "options", [{"clip": "output"}, {"group_size": 32}, {"sym": False}, {"type": "nf4", "bits": 4, "group_size": None}]
)
def test_one_scale_for_a_matrix_is_refused_where_it_cannot_be(options):
    with pytest.raises(RecipeError, match=r"per_tensor|nf4"):
        parse({"steps": [{"method": "rtn", "bits": 8, "group_size": -1, "per_tensor": True, **options}]})
