"""Matrices that no layer runs, or that run without gradients, in passes backwards and in runs that go on."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ggufmodels import small_config
from llmcompress.calib.pack import save
from llmcompress.engine.budget.fit_to_size import Budget
from llmcompress.engine.budget.matrix_grids import GridFitRequest, fitted_to_grids
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import RunError, StoppedError
from llmcompress.recipe import parse
from tinyruns import compress, digest, recipe


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made(**options): a recipe of GPTQ on token ids."""
    ids = tmp_path_factory.mktemp("text") / "ids.safetensors"
    save(torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(0)), ids)
    text = {"source": str(ids), "samples": 4, "length": 16}
    return lambda **options: recipe("gptq", **{"calibration": text, "group_size": 16, **options})


@pytest.fixture(scope="module")
def sharing(random_model_dir, tmp_path_factory):
    """A model of which two layers take the keys and values of earlier ones, and whose file has them all the same."""
    source = random_model_dir("gemma4_text", dtype="float32", **small_config("gemma4_text"))
    path = tmp_path_factory.mktemp("sharing") / "model"
    shutil.copytree(source, path)
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    kinds = config["layer_types"]
    ours = len(kinds) - config["num_kv_shared_layers"]
    assert config["num_kv_shared_layers"] > 0
    for number in range(ours, len(kinds)):
        alike = max(other for other in range(ours) if kinds[other] == kinds[number])
        for name in [name for name in tensors if f".layers.{alike}.self_attn." in name]:
            other = name.replace(f".layers.{alike}.", f".layers.{number}.")
            tensors.setdefault(other, tensors[name].clone())
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path, ours


@pytest.fixture(scope="module")
def indexing(random_model_dir):
    """A model whose layers choose the tokens to look at by matrices that run without gradients."""
    return random_model_dir("deepseek_v32", dtype="float32", **small_config("deepseek_v32") | {"index_topk": 8})


def rounded(out):
    return {record["name"]: record for record in json.loads((out / "report.json").read_text())["linears"]}


def test_keys_that_a_layer_takes_from_another_need_no_gradients(sharing, made, tmp_path):
    path, ours = sharing
    compress(path, tmp_path / "out", made(guided=True))
    assert any(f"layers.{ours}.self_attn.k_proj" in name for name in rounded(tmp_path / "out"))


def test_a_run_goes_on_after_a_layer_that_takes_keys_from_another(sharing, made, tmp_path):
    path, ours = sharing
    compress(path, tmp_path / "whole", made())
    out = tmp_path / "out"
    with pytest.raises(StoppedError):
        compress(path, out, made(), stop=lambda finished: finished == ours + 1)
    states = list(out.with_name("out.work").glob("hidden-*.bin"))
    assert states
    for file in states:  # so that it goes on from the first layer, through those that are finished
        file.unlink()
    compress(path, out, made())
    assert digest(out) == digest(tmp_path / "whole")


def test_matrices_without_gradients_are_rounded_as_without_guidance(indexing, made, tmp_path):
    compress(indexing, tmp_path / "out", made(guided=True, group_size=-1))
    assert any("indexer" in name for name in rounded(tmp_path / "out"))


@pytest.mark.parametrize("model", ["sharing", "indexing"])
def test_bits_by_a_budget_know_what_was_not_measured(model, request, made, tmp_path):
    found = request.getfixturevalue(model)
    path = found if model == "indexing" else found[0]
    asked = GridFitRequest(Budget(None, 3.5), (2, 3, 4, 8), (16,), None, None, ("int",))
    fit = fitted_to_grids(made(), path, Options(out=tmp_path / "out", threads=1), asked)
    said = {entry.subject: entry.why for entry in fit.ledger.entries if entry.kind == "budget"}
    if model == "indexing":
        assert any("indexer" in name and "that of others" in why for name, why in said.items())
    else:
        assert any("k_proj" in name and "no token" in why for name, why in said.items())


def test_an_input_is_seen_at_a_matrix_that_the_layer_runs(sharing, made, tmp_path):
    path, ours = sharing
    text, steps = made().calibration.model_dump(), [{"method": "wanda", "sparsity": 0.5, "allocation": "owl"}]
    compress(path, tmp_path / "out", parse({"calibration": text, "steps": steps, "output": {"format": "dense"}}))
    assert any(f"layers.{ours}.self_attn.k_proj" in name for name in rounded(tmp_path / "out"))


def test_an_input_that_is_seen_nowhere_is_named(sharing, made, tmp_path):
    path, ours = sharing
    skipped = made(set={"self_attn.q_proj": {"skip": True}})
    with pytest.raises(RunError, match=rf"layers\.{ours}\.self_attn\.k_proj is not run by its layer"):
        compress(path, tmp_path / "out", skipped)
