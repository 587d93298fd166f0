"""Recipes that prune, on the tiny trained model: alone, before a quantising step, into every format, or refused."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import LlmcompressError, PlanError, RecipeError, StoppedError
from llmcompress.recipe import parse
from llmcompress.validate.gguf_verify import verify_gguf
from llmcompress.validate.load import load_whole
from llmcompress.validate.verify import passed, verify
from tinyruns import FEW, carry_out, kl
from tinyruns import steps_recipe as recipe

GPTQ = {"method": "gptq", "bits": 4, "group_size": 32}


def zeros(weight):
    return float((weight == 0).float().mean())


def matrices(path):
    model = load_whole(path, dtype=torch.float32, linear=None)
    return {name: p.detach() for name, p in model.named_parameters() if "_proj." in name}


def in_pattern(weight, kept, of):
    return bool(((weight.view(weight.shape[0], -1, of) != 0).sum(-1) <= kept).all())


PRUNERS = {
    "magnitude": {"method": "magnitude"},
    "magnitude by row": {"method": "magnitude", "compare": "row"},
    "wanda": {"method": "wanda"},
    "wanda refitted": {"method": "wanda", "refit": 5},
    "ria": {"method": "wanda", "score": "ria"},
    "sparsegpt": {"method": "sparsegpt"},
    "sparsegpt as published": {"method": "sparsegpt", "refit": 0, "qep_alpha": 0},
}


HALF, TWO, FOUR = {"sparsity": 0.5}, {"pattern": "2:4"}, {"pattern": "4:8"}
ASKED = [(name, HALF) for name in PRUNERS]
ASKED += [
    ("magnitude", TWO),
    ("wanda refitted", TWO),
    ("sparsegpt", TWO),
    ("sparsegpt as published", FOUR),
    ("ria", FOUR),
]


@pytest.mark.parametrize(("name", "how"), ASKED, ids=str)
def test_as_many_weights_are_zero_as_were_asked_for(shallow_model_dir, tmp_path, name, how):
    result = carry_out(shallow_model_dir, tmp_path / "out", [{**PRUNERS[name], **how}])
    found = matrices(tmp_path / "out")
    assert len(found) == len(result["linears"]) == 7 * FEW
    for weight in found.values():
        assert zeros(weight) == pytest.approx(0.5, abs=1e-3)
        if "pattern" in how:
            assert in_pattern(weight, *map(int, how["pattern"].split(":")))
    assert {record["sparsity"] for record in result["linears"]} == {0.5}
    assert {record.get("pattern") for record in result["linears"]} == {how.get("pattern")}
    checks = verify(tmp_path / "out", shallow_model_dir)
    assert passed(checks), [check for check in checks if not check.ok]
    assert any(check.name == "sparsity" for check in checks)


def test_methods_are_in_the_order_of_what_they_know(shallow_model_dir, tmp_path, windows):
    losses = []
    for name in ("magnitude", "wanda", "sparsegpt"):
        carry_out(shallow_model_dir, tmp_path / name, [{"method": name, "sparsity": 0.6}])
        losses.append(kl(tmp_path / name, shallow_model_dir, windows))
    assert losses[0] > losses[1] > losses[2] > 0


def test_kept_weights_of_wanda_are_those_of_the_source_and_the_largest_by_input(shallow_model_dir, tmp_path):
    carry_out(shallow_model_dir, tmp_path / "out", [{"method": "wanda", "sparsity": 0.25}])
    before, after = (load_file(place / "model.safetensors") for place in (shallow_model_dir, tmp_path / "out"))
    name = "model.layers.0.mlp.up_proj.weight"
    kept = after[name] != 0
    assert torch.equal(after[name][kept], before[name][kept])
    counts = (~kept).sum(dim=1)
    assert counts.unique().tolist() == [round(0.25 * kept.shape[1])]
    assert torch.equal(before["model.norm.weight"], after["model.norm.weight"])


SPARSE = {
    "sparsegpt, gptq": [{"method": "sparsegpt", "pattern": "2:4"}, GPTQ],
    "joint": [{"method": "sparsegpt", "pattern": "2:4", "joint": True}, GPTQ],
    "wanda, gptq": [{"method": "wanda", "pattern": "2:4"}, {**GPTQ, "descent": 2}],
    "magnitude, rtn": [{"method": "magnitude", "pattern": "2:4"}, {"method": "rtn", "group_size": 32, "sym": False}],
    "rotate, sparsegpt, gptq": [{"method": "rotate"}, {"method": "sparsegpt", "pattern": "2:4"}, GPTQ],
}
PACKED = [(name, "compressed-tensors") for name in SPARSE]
PACKED += [("magnitude, rtn", "gptq"), ("wanda, gptq", "gptq"), ("joint", "dense")]  # with zero points and without


@pytest.mark.parametrize(("name", "format_"), PACKED)
def test_zeros_are_still_zero_after_packing(shallow_model_dir, tmp_path, windows, name, format_):
    carry_out(shallow_model_dir, tmp_path / "out", SPARSE[name], format_)
    for weight in matrices(tmp_path / "out").values():
        assert in_pattern(weight, 2, 4)
        assert 0.5 <= zeros(weight) < 0.75
    checks = verify(tmp_path / "out", shallow_model_dir)
    assert passed(checks), [check for check in checks if not check.ok]
    assert kl(tmp_path / "out", shallow_model_dir, windows) < 2


TYPES = {
    "nf4": ({"method": "gptq", "type": "nf4"}, "bitsandbytes"),
    "int8": ({"method": "gptq", "type": "int8", "bits": 8}, "bitsandbytes"),
    "outliers": (
        {"method": "gptq", "type": "int8", "bits": 8, "outliers": "topk", "outlier_count": 4},
        "int8-outliers",
    ),
    "fp8": ({"method": "gptq", "type": "fp8", "bits": 8}, "compressed-tensors"),
    "progressive": ({"method": "gptq", "type": "progressive", "group_size": 32}, "dense"),
    "w8a8": ({"method": "gptq", "bits": 8, "group_size": -1, "activations": "int8-token"}, "compressed-tensors"),
    "asym": ({**GPTQ, "sym": False}, "compressed-tensors"),
    "desc_act": ({**GPTQ, "actorder": "group"}, "gptq"),
}


@pytest.mark.parametrize("name", TYPES)
def test_every_grid_with_a_zero_holds_the_mask(shallow_model_dir, tmp_path, name):
    step, format_ = TYPES[name]
    result = carry_out(shallow_model_dir, tmp_path / "out", [{"method": "magnitude", "pattern": "2:4"}, step], format_)
    assert all(record["sparsity"] >= 0.5 and record["pattern"] == "2:4" for record in result["linears"])
    checks = verify(tmp_path / "out", shallow_model_dir)
    assert passed(checks), [check for check in checks if not check.ok]


def test_a_model_that_was_pruned_before_keeps_its_zeros_when_it_is_quantised(shallow_model_dir, tmp_path):
    carry_out(shallow_model_dir, tmp_path / "sparse", [{"method": "wanda", "pattern": "2:4"}])
    result = carry_out(tmp_path / "sparse", tmp_path / "out", [GPTQ], "compressed-tensors")
    sparse, out = matrices(tmp_path / "sparse"), matrices(tmp_path / "out")
    for name, weight in sparse.items():
        assert bool((out[name][weight == 0] == 0).all())
    assert all("pruner" not in record and record["sparsity"] >= 0.5 for record in result["linears"])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "Q4_1"])
def test_pruned_models_become_gguf_files(shallow_model_dir, tmp_path, windows, kind):
    """Zeros are exact in types without minima; the ledger says where they are not."""
    steps = [{"method": "sparsegpt", "sparsity": 0.5}, {"method": "gptq", "gguf": {"type": kind}}]
    out = tmp_path / "out.gguf"
    result = carry_out(shallow_model_dir, out, steps, "gguf")
    checks = verify_gguf(out, shallow_model_dir)
    assert passed(checks), [check for check in checks if not check.ok]
    inexact = [entry for entry in result["ledger"] if entry["kind"] == "sparsity"]
    assert bool(inexact) == (kind == "Q4_1")
    if kind != "Q4_1":
        from gguf import GGUFReader
        from gguf.quants import dequantize

        tensor = next(t for t in GGUFReader(out).tensors if t.name == "blk.1.ffn_up.weight")
        assert (dequantize(tensor.data, tensor.tensor_type) == 0).mean() >= 0.499


def test_outlier_weighed_layers_keep_the_mean_and_differ(shallow_model_dir, tmp_path):
    steps = [{"method": "wanda", "sparsity": 0.6, "allocation": "owl"}]
    result = carry_out(shallow_model_dir, tmp_path / "out", steps)
    by_layer = {}
    for record in result["linears"]:
        by_layer.setdefault(record["name"].split(".")[2], set()).add(round(record["sparsity"], 2))
    shares = [np.mean(list(found)) for found in by_layer.values()]
    assert np.mean(shares) == pytest.approx(0.6, abs=0.01)
    assert 0.02 < max(shares) - min(shares) <= 0.17
    assert passed(verify(tmp_path / "out", shallow_model_dir))


def test_a_pruner_that_needs_no_inputs_can_be_outlier_weighed(shallow_model_dir, tmp_path):
    steps = [{"method": "magnitude", "compare": "row", "sparsity": 0.5, "allocation": "owl"}]
    result = carry_out(shallow_model_dir, tmp_path / "out", steps)
    found = [record["sparsity"] for record in result["linears"]]
    assert np.mean(found) == pytest.approx(0.5, abs=0.02)
    assert max(found) - min(found) > 0.02


def test_a_pruning_run_that_stopped_goes_on_to_the_same_bytes(shallow_model_dir, tmp_path):
    steps = [{"method": "sparsegpt", "sparsity": 0.5, "allocation": "owl"}, GPTQ]
    plan = make_plan(recipe(steps, "compressed-tensors"), shallow_model_dir, Options(out=tmp_path / "parts"))
    with pytest.raises(StoppedError):
        run(plan, stop=lambda finished: finished == 1)
    carry_out(shallow_model_dir, tmp_path / "parts", steps, "compressed-tensors", threads=2)
    carry_out(shallow_model_dir, tmp_path / "whole", steps, "compressed-tensors", threads=1)
    for name in ("model.safetensors", "report.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_patterns_of_modules_may_differ_or_be_left_out(shallow_model_dir, tmp_path):
    given = {"mlp.*": {"sparsity": 0.75}, "layers.0.*": {"skip": True}}
    carry_out(shallow_model_dir, tmp_path / "out", [{"method": "wanda", "sparsity": 0.25, "set": given}])
    for name, weight in matrices(tmp_path / "out").items():
        expected = 0 if ".layers.0." in name else 0.75 if ".mlp." in name else 0.25
        assert zeros(weight) == pytest.approx(expected, abs=1e-3)


def test_a_matrix_that_is_pruned_and_not_quantised_stands_beside_quantised_ones(shallow_model_dir, tmp_path):
    steps = [{"method": "wanda", "sparsity": 0.5}, {**GPTQ, "set": {"mlp.down_proj": {"skip": True}}}]
    carry_out(shallow_model_dir, tmp_path / "out", steps, "compressed-tensors")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert zeros(tensors["model.layers.0.mlp.down_proj.weight"]) == pytest.approx(0.5, abs=1e-3)
    assert "model.layers.0.mlp.up_proj.weight_packed" in tensors
    checks = verify(tmp_path / "out", shallow_model_dir)
    assert passed(checks), [check for check in checks if not check.ok]


@pytest.mark.parametrize("family", ["mixtral", "gpt2", "opt", "phi3"])
def test_other_architectures_are_pruned_too(random_model_dir, tmp_path, family):
    model = random_model_dir(family)
    ids = torch.randint(0, 96, (8, 32), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    text = {"source": str(tmp_path / "ids.safetensors"), "samples": 8, "length": 32}
    steps = [{"method": "wanda", "pattern": "2:4"}]
    wanted = parse({"calibration": text, "steps": steps, "output": {"format": "dense"}})
    result = run(make_plan(wanted, model, Options(out=tmp_path / "out")))
    assert result["linears"]
    assert {record["sparsity"] for record in result["linears"]} == {0.5}
    checks = verify(tmp_path / "out", model)
    assert passed(checks), [check for check in checks if not check.ok]


def test_every_matrix_loses_its_share_while_others_are_rounded(shallow_model_dir, tmp_path):
    """Also one that reads what others read, and one that is not rounded."""
    rounding = {**GPTQ, "set": {"o_proj": {"skip": True}}}
    carry_out(shallow_model_dir, tmp_path / "out", [{"method": "sparsegpt", "sparsity": 0.5, "joint": True}, rounding])
    found = {name: zeros(weight) for name, weight in matrices(tmp_path / "out").items()}
    assert len(found) == 14
    assert {share for name, share in found.items() if ".o_proj" in name} == {0.5}
    assert min(found.values()) == 0.5  # others are rounded to zero beside


WRONG = {
    "sparsity of 1": ([{"method": "wanda", "sparsity": 1.0}], RecipeError, "sparsity"),
    "negative": ([{"method": "wanda", "sparsity": -0.1}], RecipeError, "sparsity"),
    "neither": ([{"method": "wanda"}], RecipeError, "either sparsity or pattern"),
    "both": ([{"method": "wanda", "sparsity": 0.5, "pattern": "2:4"}], RecipeError, "either sparsity or pattern"),
    "no pattern": ([{"method": "wanda", "pattern": "2-4"}], RecipeError, "n:m"),
    "all kept": ([{"method": "wanda", "pattern": "4:4"}], RecipeError, "n:m"),
    "width": ([{"method": "wanda", "pattern": "3:7"}], PlanError, "3:7 does not divide the 256 inputs"),
    "owl of a pattern": ([{"method": "wanda", "pattern": "2:4", "allocation": "owl"}], RecipeError, "no choice"),
    "pruned after rounding": (
        [GPTQ, {"method": "wanda", "sparsity": 0.5}],
        PlanError,
        "step 2, wanda, comes after gptq",
    ),
    "rotated after pruning": (
        [{"method": "wanda", "sparsity": 0.5}, {"method": "rotate"}],
        PlanError,
        "step 2, rotate",
    ),
    "pruned twice": (
        [{"method": "wanda", "sparsity": 0.5}, {"method": "magnitude", "sparsity": 0.5}],
        PlanError,
        "is the second one that prunes",
    ),
    "joint with nothing": ([{"method": "sparsegpt", "sparsity": 0.5, "joint": True}], PlanError, "joint"),
    "joint with options of its own": (
        [{"method": "sparsegpt", "sparsity": 0.5, "joint": True, "refit": 5}, GPTQ],
        RecipeError,
        "no refit",
    ),
    "a pattern among outliers": (
        [
            {"method": "sparsegpt", "pattern": "2:4", "joint": True},
            {"method": "gptq", "type": "int8", "outliers": "topk", "outlier_count": 6},
        ],
        PlanError,
        "keeps outliers whole",
    ),
    "owl's span without owl": ([{"method": "wanda", "sparsity": 0.5, "owl_span": 0.1}], RecipeError, "owl_span"),
    "owl for some": (
        [{"method": "wanda", "sparsity": 0.5, "set": {"q_proj": {"allocation": "owl"}}}],
        PlanError,
        "allocation of wanda is of all matrices",
    ),
    "a head at a pattern": ([{**GPTQ, "set": {"q_proj": {"head_bits": 4}}}], PlanError, "head_bits of gptq is of all"),
    "windows of the original at a pattern": (
        [{"method": "sparsegpt", "sparsity": 0.5, "set": {"q_proj": {"qep_samples": 4}}}],
        PlanError,
        "qep_samples of sparsegpt is of all",
    ),
    "windows of the original where layers are trained": (
        [{**GPTQ, "recover": "block", "qep_samples": 4}],
        RecipeError,
        "no qep_samples",
    ),
    "unknown matrix": (
        [{"method": "wanda", "sparsity": 0.5, "set": {"nothing": {"skip": True}}}],
        PlanError,
        "nothing",
    ),
    "format": ([{"method": "wanda", "sparsity": 0.5}], PlanError, "no step quantises"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_refused_by_one_line_before_anything_is_read(shallow_model_dir, tmp_path, name):
    steps, kind, words = WRONG[name]
    with pytest.raises(kind, match=words) as caught:
        carry_out(shallow_model_dir, tmp_path / "out", steps, "gptq" if name == "format" else "dense")
    assert isinstance(caught.value, LlmcompressError)
    assert "\n" not in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_verify_sees_a_zero_that_came_alive(shallow_model_dir, tmp_path):
    carry_out(shallow_model_dir, tmp_path / "out", [{"method": "wanda", "pattern": "2:4"}])
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    weight = tensors["model.layers.1.mlp.up_proj.weight"]
    weight[weight == 0] = 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    checks = {check.name: check for check in verify(tmp_path / "out")}
    assert not checks["sparsity"].ok
    assert "up_proj" in checks["sparsity"].detail
