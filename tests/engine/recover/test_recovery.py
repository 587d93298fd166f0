"""Recovered models: nearer to the original, codes as they were, proved by `verify`, the same bytes every time."""

import json
import math
import shutil
from functools import partial

import pytest
import torch
from recovered import LENGTH, compressed, planned, recovered, write_ids
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.run.tokens import tokens_for
from llmcompress.engine.structure.depth import DepthRequest, plan_depth, prune_depth
from llmcompress.engine.structure.width import WidthRequest, plan_width, prune_width
from llmcompress.engine.train.trained import RANK
from llmcompress.errors import CheckpointError, PlanError, RunError
from llmcompress.recipe import Calibration, build
from llmcompress.validate.session import Request, evaluate_paths
from llmcompress.validate.verify import passed, verify

FLOAT32 = partial(Options, compute_dtype="float32")
RTN = {"method": "rtn", "bits": 3, "group_size": 16}
FORMS = {  # step, format, and what the names of tensors that move end with
    "compressed-tensors": (RTN, "compressed-tensors", ("weight_scale",)),
    "asymmetric": ({**RTN, "sym": False}, "compressed-tensors", ("weight_scale",)),
    "gptq": (RTN, "gptq", ("scales",)),
    "awq": ({**RTN, "bits": 4, "sym": False}, "awq", ("scales",)),
    "mlx": ({**RTN, "type": "offset", "group_size": 32}, "mlx", ("scales", "biases")),
    "fp8": ({"method": "rtn", "type": "fp8", "bits": 8}, "compressed-tensors", ("weight_scale",)),
    "rounded inputs": (
        {"method": "rtn", "bits": 3, "group_size": 16, "activations": "int8-token"},
        "compressed-tensors",
        ("weight_scale",),
    ),
    "fixed scale of inputs": (
        {"method": "rtn", "bits": 3, "group_size": 16, "activations": "int8-tensor"},
        "compressed-tensors",
        ("weight_scale",),
    ),
    "nf4": ({"method": "rtn", "type": "nf4", "double_quant": False}, "bitsandbytes", ("weight.absmax",)),
    "dense": (RTN, "dense", ()),
}


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    return write_ids(tmp_path_factory.mktemp("ids") / "ids.safetensors")


@pytest.fixture(scope="module")
def model(random_model_dir):
    return random_model_dir("llama", hidden_size=64, intermediate_size=128)


@pytest.mark.parametrize("name", FORMS)
def test_codes_stay_and_predictions_come_nearer(name, model, tmp_path):
    step, form, moving = FORMS[name]
    ids = write_ids(tmp_path / "ids.safetensors", samples=160)
    out = compressed(model, tmp_path / "out", step, form=form, source=ids)
    report = recovered(out, model, tmp_path / "to", ids, steps=32, rate=1e-3, samples=160)
    checks = verify(tmp_path / "to", model)
    assert passed(checks), [check for check in checks if not check.ok]
    held = report["recovery"]["held_back"]["calibration"]
    assert held["kl"] < held["kl_before"]
    before, after = (load_file(path / "model.safetensors") for path in (out, tmp_path / "to"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(name.endswith((*moving, "norm.weight")) for name in moved)
    assert any(name.endswith("norm.weight") for name in moved)
    if moving:
        assert sum(name.endswith(moving) for name in moved) >= 14
    assert report["recovery"]["matrices"] == (0 if name == "dense" else 14)
    assert all((before[name].dtype, before[name].shape) == (after[name].dtype, after[name].shape) for name in before)
    recipe = (tmp_path / "to" / "llmcompress.yaml").read_bytes()
    assert recipe == (out / "llmcompress.yaml").read_bytes()


@pytest.mark.parametrize("weights", ["full", "low-rank"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # the latter's matrices are stored [in, out]
def test_weights_that_stay_are_trained_and_zeros_stay(family, weights, random_model_dir, tmp_path):
    model = random_model_dir(family)
    ids = write_ids(tmp_path / "ids.safetensors", samples=160)
    out = compressed(model, tmp_path / "out", {"method": "magnitude", "pattern": "2:4"}, form="dense")
    report = recovered(out, model, tmp_path / "to", ids, steps=32, rate=1e-3, samples=160, weights=weights)
    checks = verify(tmp_path / "to", model)
    assert passed(checks), [check for check in checks if not check.ok]
    held = report["recovery"]["held_back"]["calibration"]
    assert held["kl"] < held["kl_before"]
    before, after = (load_file(path / "model.safetensors") for path in (out, tmp_path / "to"))
    assert report["recovery"]["weights"] == weights
    pruned = {f"{item['name']}.weight" for item in report["linears"]}
    assert report["recovery"]["pruned"] == len(pruned) > 0
    for name in pruned:
        assert torch.equal(before[name] == 0, after[name] == 0)
        assert not torch.equal(before[name], after[name])
    assert "weights that stayed" in (tmp_path / "to" / "README.md").read_text()


def shallower(model, out, text):
    prune_depth(plan_depth(model, DepthRequest(1, keep_first=0, keep_last=1), text, FLOAT32(out=out)))


def narrower(model, out, text):
    prune_width(plan_width(model, WidthRequest(ffn=64), text, FLOAT32(out=out)))


@pytest.mark.parametrize("weights", ["full", "low-rank"])
@pytest.mark.parametrize("removal", [shallower, narrower])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_models_that_lost_layers_or_channels_are_trained(family, removal, weights, random_model_dir, tmp_path):
    """Every matrix and norm moves towards the original, which has another structure, and all else stays."""
    size = {"intermediate_size": 128, "num_hidden_layers": 3} if family == "llama" else {"n_inner": 128, "n_layer": 3}
    model = random_model_dir(family, hidden_size=64, **size)
    ids = write_ids(tmp_path / "ids.safetensors", samples=160)
    out = tmp_path / "out"
    removal(model, out, build(Calibration, {"source": str(ids), "samples": 4, "length": LENGTH}, "here"))
    for start, to in ((out, tmp_path / "to"), (tmp_path / "to", tmp_path / "again")):
        report = recovered(start, model, to, ids, steps=32, rate=1e-3, samples=160, weights=weights)
        held = report["recovery"]["held_back"]["calibration"]
        assert held["kl"] < held["kl_before"]
        checks = verify(to, model)
        assert passed(checks), [check for check in checks if not check.ok]
        assert AutoModelForCausalLM.from_pretrained(to).config.to_dict() == (
            AutoModelForCausalLM.from_pretrained(out).config.to_dict() | {"_name_or_path": str(to)}
        )
    before, after = (load_file(path / "model.safetensors") for path in (out, tmp_path / "to"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    matrices = {f"{item['name']}.weight" for item in report["linears"]}
    assert report["recovery"]["pruned"] == len(matrices) > 0
    assert matrices <= moved
    assert all("norm" in name or "ln_" in name for name in moved - matrices)
    weight = next(iter(matrices & load_file(model / "model.safetensors").keys()))
    after[weight] = after[weight] + 0.01
    save_file(after, tmp_path / "to" / "model.safetensors", {"format": "pt"})
    assert not passed(verify(tmp_path / "to", model))


def test_full_weights_that_do_not_fit_are_refused_with_the_way_out(random_model_dir, ids, tmp_path):
    model = random_model_dir("llama", hidden_size=256, intermediate_size=1024)
    out = compressed(model, tmp_path / "out", {"method": "magnitude", "pattern": "2:4"}, form="dense")
    full, low = (planned(out, model, tmp_path / "to", ids, weights=weights) for weights in ("full", "low-rank"))
    shapes = [item["shape"] for item in full.report["linears"]]
    more = sum(map(math.prod, shapes)) - RANK * sum(map(sum, shapes))
    assert 0 < full.memory_bytes - low.memory_bytes <= 20 * more
    assert full.scratch_bytes - low.scratch_bytes == 32 * more
    limit = int(full.memory_bytes * 1.1) - 1  # a tenth is kept free
    planned(out, model, tmp_path / "to", ids, weights="low-rank", max_memory=limit)
    with pytest.raises(PlanError, match="or use --weights low-rank"):
        planned(out, model, tmp_path / "to", ids, weights="full", max_memory=limit)


def test_other_windows_come_nearer_as_well(shallow_model_dir, tmp_path):
    """On the shipped evaluation text, which nothing was fitted to; the model and its tokenizer are real."""
    out = compressed(shallow_model_dir, tmp_path / "out", {"method": "gptq", "bits": 3, "group_size": 64})
    recovered(out, shallow_model_dir, tmp_path / "to", "default", steps=32, length=64)

    def kl(path):
        request = Request(path, shallow_model_dir, "default", 64, 8, 4, "cpu", "float32")
        return evaluate_paths(request, lambda done, of: None)["kl"]

    assert kl(tmp_path / "to") < 0.95 * kl(out)


def test_factors_of_scaled_channels_are_kept(model, ids, tmp_path):
    """Gains that AWQ has divided are multiplied once more, and the output says by what."""
    steps = {"method": "awq", "steps": 2}, RTN
    out = compressed(model, tmp_path / "out", *steps, source=ids)
    recovered(out, model, tmp_path / "to", ids)
    checks = verify(tmp_path / "to", model)
    assert passed(checks), [check for check in checks if not check.ok]


def test_figures_of_the_model_as_it_was_leave_the_card(model, ids, tmp_path):
    out = compressed(model, tmp_path / "out")
    card = (out / "README.md").read_text()
    figures = "model-index:\n- name: x\n  results: []\n"
    (out / "README.md").write_text(card.replace("---\n", f"---\n{figures}", 1))
    recovered(out, model, tmp_path / "to", ids)
    said = (tmp_path / "to" / "README.md").read_text()
    assert said.startswith(card.rstrip())
    assert "model-index" not in said
    assert said[len(card) :].lstrip().startswith("## Recovery\n")


def test_rotated_models_are_recovered(model, ids, tmp_path):
    out = compressed(model, tmp_path / "out", {"method": "rotate"}, RTN)
    report = recovered(out, model, tmp_path / "to", ids)
    held = report["recovery"]["held_back"]["calibration"]
    assert held["kl"] < held["kl_before"]
    assert passed(verify(tmp_path / "to", model))


def test_the_same_bytes_for_any_number_of_threads(model, ids, tmp_path):
    out = compressed(model, tmp_path / "out")
    for threads in (1, 2):
        recovered(out, model, tmp_path / f"to{threads}", ids, threads=threads)
    names = {file.name for file in (tmp_path / "to1").iterdir()}
    assert names == {file.name for file in (tmp_path / "to2").iterdir()}
    assert all((tmp_path / "to1" / name).read_bytes() == (tmp_path / "to2" / name).read_bytes() for name in names)


def test_nothing_is_written_where_the_divergence_rises(model, ids, tmp_path):
    out = compressed(model, tmp_path / "out")
    with pytest.raises(RunError, match=r"did not fall: calibration 0.\d+ before, calibration \d") as raised:
        recovered(out, model, tmp_path / "to", ids, steps=4, rate=3.0)
    assert raised.value.exit_code == 1
    assert not list(tmp_path.glob("to*"))


def test_two_texts_are_held_back_where_another_is_trained_on(tiny_model_dir, tmp_path):
    out = compressed(tiny_model_dir, tmp_path / "out")
    (tmp_path / "text.txt").write_text("One two three four five six seven. " * 400)
    report = recovered(out, tiny_model_dir, tmp_path / "to", tmp_path / "text.txt", steps=4, rate=1e-3)
    assert {name: item["windows"] for name, item in report["recovery"]["held_back"].items()} == {
        "calibration": 2,
        "shipped text": 2,
    }


def test_no_more_of_the_shipped_text_is_drawn_than_there_is(tiny_model_dir, tmp_path):
    out = compressed(tiny_model_dir, tmp_path / "out")
    (tmp_path / "text.txt").write_text("One two three four five six seven. " * 400)
    plan = planned(out, tiny_model_dir, tmp_path / "to", tmp_path / "text.txt", samples=1_000_000)
    tokens = tokens_for(plan.other, tiny_model_dir, "float32")
    assert tokens.shape == (plan.other.samples, plan.other.length)
    assert 90_000 < tokens.numel() <= 100_000


def test_a_stopped_recovery_goes_on_with_batches_of_the_same_size(model, ids, tmp_path):
    out = compressed(model, tmp_path / "out")
    one, two = (planned(out, model, tmp_path / "to", ids, batch=batch).identity for batch in (1, 2))
    assert one != two


def test_other_originals_are_refused(model, random_model_dir, ids, tmp_path):
    out = compressed(model, tmp_path / "out")
    other = shutil.copytree(model, tmp_path / "other")
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match="has other weights than what"):
        recovered(out, other, tmp_path / "to", ids)
    with pytest.raises(CheckpointError, match=r"was not made from .*, by its report.json"):
        planned(out, random_model_dir("llama", num_hidden_layers=1), tmp_path / "to", ids)
    assert not list(tmp_path.glob("to*"))


def test_what_cannot_be_trained_on_is_refused(model, ids, tmp_path):
    out = compressed(model, tmp_path / "out")
    with pytest.raises(PlanError, match="--samples 31 leaves too few windows"):
        planned(out, model, tmp_path / "to", ids, samples=31)
    with pytest.raises(PlanError, match="text is not sampled for training"):
        planned(out, model, tmp_path / "to", "self")
    report = json.loads((out / "report.json").read_text())
    for content, message in (
        ({**report, "linears": [{}]}, "a record of a matrix that cannot be used"),
        ({**report, "files": 3}, "does not tell of its files"),
        ({**report, "adapter": {"sha256": "0"}}, "an adapter was merged"),
    ):
        (out / "report.json").write_text(json.dumps(content))
        with pytest.raises((CheckpointError, PlanError), match=message):
            planned(out, model, tmp_path / "to", ids)
    (out / "report.json").unlink()
    with pytest.raises(CheckpointError, match="give a directory that llmcompress wrote"):
        planned(out, model, tmp_path / "to", ids)
