"""The output head is rounded like any other matrix, on the final norm's outputs, or refused when a run is planned."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from yaml import safe_load

from llmcompress.engine.plan.head_matrix import coded_ends
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.targets.base import targets
from llmcompress.engine.targets.verdicts import violations
from llmcompress.errors import LlmcompressError, PlanError, StoppedError
from llmcompress.solve import row_blocks
from llmcompress.validate.load import load_whole
from llmcompress.validate.verify import passed, verify
from tinyruns import FEW, after, compress, digest, recipe

MORE = {"samples": 32, "length": 128}


@pytest.fixture(scope="module")
def untied(tmp_path_factory, shallow_model_dir):
    """The shallow model with its embedding once more as a head of its own."""
    path = tmp_path_factory.mktemp("untied") / "model"
    shutil.copytree(shallow_model_dir, path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return path


def loaded(path):
    """transformers' model and what enters its head for tokens that no calibration has seen in this order."""
    from transformers import AutoModelForCausalLM

    model, seen = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), []
    model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    with torch.no_grad():
        logits = model(torch.randint(5, 1100, (1, 256), generator=torch.Generator().manual_seed(3))).logits[0]
    return model, seen[0].to(torch.float64), logits


@pytest.mark.parametrize("format_", ["compressed-tensors", "dense"])
def test_the_head_is_rounded_and_transformers_runs_it(untied, tmp_path, format_):
    out = tmp_path / "out"
    report = compress(untied, out, recipe(format_=format_, head_bits=3))
    assert report["linears"][-1]["name"] == "lm_head"
    assert report["linears"][-1]["grid"] == "int3-g64-sym"
    assert passed(verify(out, source=untied))
    source = load_file(untied / "model.safetensors")["lm_head.weight"].to(torch.float64)
    model, inputs, logits = loaded(out)
    weight = model.lm_head.weight.detach().to(torch.float64)
    groups = weight.reshape(-1, 64)
    assert max(row.unique().numel() for row in groups[:200]) <= 8
    torch.testing.assert_close(inputs @ weight.T, logits.to(torch.float64), atol=1e-3, rtol=1e-4)

    def loss(candidate):
        return float((inputs @ (candidate - source).T).square().sum() / (inputs @ source.T).square().sum())

    parts = source.reshape(-1, 64)
    scale = parts.abs().amax(1, keepdim=True) / 4
    nearest = ((parts / scale).round().clamp(-4, 3) * scale).reshape(source.shape)
    assert loss(weight) < 0.7 * loss(nearest)


def test_a_run_that_stops_before_the_head_goes_on_to_the_same_bytes(untied, tmp_path):
    made = recipe(head_bits=6)
    compress(untied, tmp_path / "whole", made)
    with pytest.raises(StoppedError):
        compress(untied, tmp_path / "cut", made, stop=after(FEW))
    compress(untied, tmp_path / "cut", made)
    whole, cut = digest(tmp_path / "whole"), digest(tmp_path / "cut")
    assert whole["model.safetensors"] == cut["model.safetensors"]
    assert whole["config.json"] == cut["config.json"]


def test_a_layer_that_is_missing_below_a_finished_head_is_made_again(untied, tmp_path):
    """As the hint for a damaged section says: remove this file and run again."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    compress(untied, whole, recipe(head_bits=4))
    compress(untied, out, recipe(head_bits=4), keep_work=True)
    shutil.rmtree(out)
    (section,) = out.with_name("out.work").glob("section-00001*")
    section.unlink()
    compress(untied, out, recipe(head_bits=4))
    assert digest(out) == digest(whole)


def test_blocks_of_rows_of_a_head_are_the_rows_of_one_piece(untied, tmp_path, monkeypatch):
    made = recipe(head_bits=4)
    whole = compress(untied, tmp_path / "whole", made)  # fewer rows than are solved at once
    monkeypatch.setattr(row_blocks, "SOLVED_ROWS", 100)
    monkeypatch.setattr(row_blocks, "LOOKED_AT", 1000)
    cut = compress(untied, tmp_path / "cut", made)
    assert whole["linears"][-1]["shape"][0] > 500
    assert digest(tmp_path / "whole")["model.safetensors"] == digest(tmp_path / "cut")["model.safetensors"]
    for name in ("relative_error", "loss", "rtn_ratio"):
        assert cut["linears"][-1][name] == pytest.approx(whole["linears"][-1][name], rel=1e-4)


def test_options_of_the_head_alone_go_by_its_name(untied, tmp_path):
    made = recipe(head_bits=8, set={"lm_head": {"group_size": 32}, "*": {"bits": 3}})
    plan = make_plan(made, untied, Options(out=tmp_path / "out"))
    assert [matrix.grid.name for matrix in plan.head] == ["int8-g32-sym"]
    assert {matrix.grid.bits for layer in plan.layers for matrix in layer} == {3}
    assert make_plan(recipe(), untied, Options(out=tmp_path / "other")).head == ()


@pytest.mark.parametrize("format_", ["compressed-tensors", "gptq"])
def test_a_head_that_is_the_embedding_is_refused_where_loaders_read_no_embedding(shallow_model_dir, tmp_path, format_):
    with pytest.raises(PlanError, match="read no codes of the head, which is the embedding") as error:
        make_plan(recipe(format_=format_, head_bits=6), shallow_model_dir, Options(out=tmp_path / "out"))
    assert "--format mlx" in error.value.hint


@pytest.mark.parametrize("format_", ["dense", "mlx"])
def test_a_head_that_is_the_embedding_is_rounded_once_by_both_losses(shallow_model_dir, untied, tmp_path, format_):
    report = compress(shallow_model_dir, tmp_path / "tied", recipe(format_=format_, head_bits=3, calibration=MORE))
    assert report["linears"][-1]["name"] == "model.embed_tokens"
    assert passed(verify(tmp_path / "tied", source=shallow_model_dir))
    compress(untied, tmp_path / "alone", recipe(format_=format_, head_bits=3, calibration=MORE))
    source = load_file(shallow_model_dir / "model.safetensors")["model.embed_tokens.weight"].to(torch.float64)
    both, alone = (load_whole(tmp_path / name, dtype=torch.float32, linear=None) for name in ("tied", "alone"))
    weight = both.get_input_embeddings().weight.detach().to(torch.float64)
    assert torch.equal(weight, both.get_output_embeddings().weight.detach().to(torch.float64))
    head = alone.get_output_embeddings().weight.detach().to(torch.float64)
    parts = source.reshape(-1, 64)
    scale = parts.abs().amax(1, keepdim=True) / 4
    nearest = ((parts / scale).round().clamp(-4, 3) * scale).reshape(source.shape)
    _, inputs, _ = loaded(untied)

    def losses(candidate):
        error = candidate - source
        return float((inputs @ error.T).square().sum()), float(error.square().sum())

    (tied_head, tied_rows), (head_alone, rows_alone), (plain_head, _) = map(losses, (weight, head, nearest))
    assert tied_rows < 0.95 * rows_alone
    assert head_alone < tied_head < 0.8 * plain_head


def test_an_embedding_of_its_own_is_rounded_by_its_values(untied, tmp_path):
    few, more = (
        recipe(format_="mlx", type="offset", embedding_bits=4, calibration=text) for text in ({}, {"samples": 4})
    )
    report = compress(untied, tmp_path / "few", few)
    compress(untied, tmp_path / "more", more)
    assert [(item["name"], item["method"]) for item in report["linears"][-1:]] == [("model.embed_tokens", "rtn")]
    assert passed(verify(tmp_path / "few", source=untied))
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("few", "more"))
    assert torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert not torch.equal(one["model.layers.0.mlp.up_proj.weight"], other["model.layers.0.mlp.up_proj.weight"])
    source = load_file(untied / "model.safetensors")
    assert torch.equal(one["lm_head.weight"], source["lm_head.weight"])
    table = source["model.embed_tokens.weight"].to(torch.float64)
    found = load_whole(tmp_path / "few", dtype=torch.float32, linear=None).get_input_embeddings().weight.detach()
    parts = table.reshape(-1, 64)
    low, high = parts.amin(1, keepdim=True), parts.amax(1, keepdim=True)
    covering = (((parts - low) / (high - low) * 15).round() / 15 * (high - low) + low).reshape(table.shape)
    assert (found - table).square().sum() < 0.97 * (covering - table).square().sum()


def test_head_and_embedding_are_also_asked_for_by_their_names(untied, tmp_path):
    """Of any method: rounded to the nearest value of a grid that covers each group."""
    named = {"lm_head": {"skip": False, "bits": 8}, "model.embed_tokens": {"skip": False, "group_size": 32}}
    compress(untied, tmp_path / "out", recipe("rtn", format_="dense", clip="minmax", set=named))
    assert passed(verify(tmp_path / "out", source=untied))
    source, found = (load_file(path / "model.safetensors") for path in (untied, tmp_path / "out"))
    for name, most, size in (("lm_head.weight", 127, 64), ("model.embed_tokens.weight", 7, 32)):
        parts = source[name].to(torch.float64).reshape(-1, size)
        step = parts.abs().amax(1, keepdim=True) / most
        error = (found[name].to(torch.float64).reshape(-1, size) - parts).abs()
        assert (error <= step).all()
        assert 0.2 < (error / step).mean() < 0.3  # spread evenly between two codes


def test_an_embedding_that_is_the_head_is_asked_for_as_the_head(shallow_model_dir, tmp_path):
    with pytest.raises(PlanError, match="is its head too") as error:
        make_plan(recipe(format_="mlx", embedding_bits=6), shallow_model_dir, Options(out=tmp_path / "out"))
    assert "--head-bits" in error.value.hint


def test_formats_whose_loaders_read_no_embedding_are_refused(untied, tmp_path):
    with pytest.raises(PlanError, match="compressed-tensors read no codes of the embedding"):
        make_plan(recipe(embedding_bits=6), untied, Options(out=tmp_path / "out"))


def test_a_type_that_lacks_the_bits_of_the_head_says_how_to_give_it_another(untied, tmp_path):
    options = {"type": "nvfp4", "bits": 4, "group_size": None, "head_bits": 8}
    with pytest.raises(PlanError, match="type nvfp4 has 4 bits, and --head-bits asks for 8") as error:
        make_plan(recipe(**options), untied, Options(out=tmp_path / "out"))
    module, said = error.value.hint.partition("'")[2].rstrip("'").split(": ", 1)
    options["set"] = {module: safe_load(said)}
    plan = make_plan(recipe(**options), untied, Options(out=tmp_path / "out"))
    assert [matrix.grid.name for matrix in plan.head] == ["int8-g64-sym"]


@pytest.mark.parametrize("format_", ["awq", "bitsandbytes"])
def test_formats_whose_loaders_read_no_head_are_refused(untied, tmp_path, format_):
    with pytest.raises(LlmcompressError, match=f"loaders of format {format_} read no codes of a head"):
        make_plan(recipe(format_=format_, sym=False, head_bits=4), untied, Options(out=tmp_path / "out"))


def test_a_target_that_was_not_seen_to_read_codes_of_a_head_says_so(untied, tmp_path):
    plan = make_plan(recipe(head_bits=4), untied, Options(out=tmp_path / "out"))
    found = violations(targets()["sglang"], plan.format.name, plan.entries, plan.headers.config)
    assert [item.modules for item in found if "read codes of a head" in item.what] == [("lm_head",)]


@pytest.mark.parametrize("embedded", [True, False])
def test_a_head_that_is_tied_and_stored_is_offered_no_grid(embedded, untied, tmp_path):
    """Loaders take one of the two for both, with or without a tensor of the embedding."""
    model = shutil.copytree(untied, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    plan = make_plan(recipe("rtn", "mlx", type="offset"), model, Options(out=tmp_path / "out"))
    assert coded_ends(plan.anatomy, plan.format) == ["lm_head", "model.embed_tokens"]
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    if not embedded:
        tensors = load_file(model / "model.safetensors")
        del tensors["model.embed_tokens.weight"]
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    plan = make_plan(recipe("rtn", "mlx", type="offset"), model, Options(out=tmp_path / "out"))
    assert coded_ends(plan.anatomy, plan.format) == []
