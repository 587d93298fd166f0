"""Drafts of a model's first layers: transformers' own model cut, nearer to it once trained, the same bytes always."""

import json
from itertools import count

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llmcompress.engine.draft import pruned
from llmcompress.engine.draft.pruned import PrunedDraftRequest, plan_pruned_draft, train_pruned_draft
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import PlanError, RunError
from llmcompress.recipe import Calibration, build, parse
from llmcompress.validate.load import load_whole
from llmcompress.validate.verify import passed, verify

LENGTH = 24


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    path = tmp_path_factory.mktemp("ids") / "ids.safetensors"
    generator = torch.Generator().manual_seed(1)
    save_file({"input_ids": torch.randint(2, 90, (160, LENGTH), generator=generator)}, path)
    return path


@pytest.fixture(scope="module")
def model(random_model_dir):
    return random_model_dir("llama", num_hidden_layers=4)


def compressed(model, out, form="gptq", **more):
    step = {"method": "rtn", "bits": 4, "group_size": 16, **more}
    recipe = parse({"steps": [step], "output": {"format": form}})
    run(make_plan(recipe, model, Options(out=out, compute_dtype="float32")))
    return out


def planned(model, out, ids, layers=2, steps=32, rate=1e-3, samples=160, written=0, threads=1, overwrite=False):
    text = build(Calibration, {"source": str(ids), "samples": samples, "length": LENGTH}, "here")
    options = Options(out=out, compute_dtype="float32", threads=threads, overwrite=overwrite)
    return plan_pruned_draft(model, PrunedDraftRequest(layers, steps, written, rate), text, options)


def drafted(*arguments, **settings):
    return train_pruned_draft(planned(*arguments, **settings))


@torch.no_grad()
def divergence(target, draft, tokens):
    p, q = (model(tokens, use_cache=False).logits.double().log_softmax(-1) for model in (target, draft))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("form", ["gptq", "awq", "mlx", "dense", None])
def test_it_begins_as_the_first_layers_of_transformers_own_model(form, model, ids, tmp_path, monkeypatch):
    """Logits of the untrained cut are those of the decoded model of which all other layers were taken out."""
    more = {"mlx": {"type": "offset", "group_size": 32}, "awq": {"sym": False}}.get(form, {})
    target = model if form is None else compressed(model, tmp_path / "target", form, **more)
    seen = {}

    def look(plan, out, watch):
        path = plan.opened.headers.path
        seen["draft"] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        seen["files"] = load_file(path / "model.safetensors")
        seen["checks"] = verify(path, target)

    monkeypatch.setattr(pruned, "recover_into", look)
    drafted(target, tmp_path / "out", ids)
    whole = load_whole(target, dtype=torch.float32, linear=None)
    whole.model.layers = whole.model.layers[:2]
    tokens = load_file(ids)["input_ids"][:4]
    with torch.no_grad():
        found, wanted = (item(tokens, use_cache=False).logits for item in (seen["draft"], whole))
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)  # codes are decoded in bfloat16
    original = load_file(model / "model.safetensors")
    assert seen["files"].keys() == {name for name in original if not any(f"layers.{gone}." in name for gone in (2, 3))}
    assert all(tensor.dtype == original[name].dtype for name, tensor in seen["files"].items())
    assert passed(seen["checks"]), seen["checks"]
    assert not list(tmp_path.glob("out*"))


def test_training_brings_it_nearer_to_the_model_as_it_is_served(model, ids, tmp_path):
    """KL on text held back is that of whole models, before and after."""
    target = compressed(model, tmp_path / "target", "compressed-tensors", bits=3, activations="int8-token")
    report = drafted(target, tmp_path / "out", ids)
    assert report["depth"]["removed"] == [2, 3]
    assert report["calibration"] is None
    held = report["recovery"]["held_back"]["calibration"]
    tokens = load_file(ids)["input_ids"][15::16]
    served, draft = (load_whole(path, dtype=torch.float32) for path in (target, tmp_path / "out"))
    assert held["kl"] == pytest.approx(divergence(served, draft, tokens), rel=0.02)
    cut = load_whole(target, dtype=torch.float32, linear=None)
    cut.model.layers = cut.model.layers[:2]
    assert held["kl"] < held["kl_before"] == pytest.approx(divergence(served, cut, tokens), rel=0.05)
    checks = verify(tmp_path / "out", target)
    assert passed(checks), [check for check in checks if not check.ok]
    assert str(tmp_path) not in (tmp_path / "out" / "report.json").read_text()


def test_the_same_bytes_for_any_number_of_threads_and_after_every_stop(model, ids, tmp_path):
    target = compressed(model, tmp_path / "target")
    for threads in (1, 2):
        drafted(target, tmp_path / f"to{threads}", ids, threads=threads, steps=8)
    plan, starts = planned(target, tmp_path / "again", ids, steps=8), count()

    def stop(done, of):
        if done < of:
            raise KeyboardInterrupt

    while not (tmp_path / "again").exists():
        next(starts)
        try:
            train_pruned_draft(plan, stop)
        except KeyboardInterrupt:
            assert {path.name for path in tmp_path.glob("again*")} == {"again.work"}
    assert next(starts) == 4 + 8  # each layer of the target, and each step
    assert not (tmp_path / "again.work").exists()
    names = {file.name for file in (tmp_path / "to1").iterdir()}
    for other in ("to2", "again"):
        assert names == {file.name for file in (tmp_path / other).iterdir()}
        assert all((tmp_path / "to1" / name).read_bytes() == (tmp_path / other / name).read_bytes() for name in names)


def test_text_of_its_own_is_learnt_too(shallow_model_dir, tmp_path):
    target = compressed(shallow_model_dir, tmp_path / "target", group_size=64)
    report = drafted(target, tmp_path / "out", "default", layers=1, steps=8, samples=16, written=16)
    held = report["recovery"]["held_back"]
    assert {name: item["windows"] for name, item in held.items()} == {"calibration": 1, "written": 1}
    assert report["recovery"]["calibration"]["samples"] == 32
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    assert "quantization_config" not in config
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()


def test_nothing_is_written_where_the_divergence_rises(model, ids, tmp_path):
    with pytest.raises(RunError, match="did not fall") as raised:
        drafted(model, tmp_path / "to", ids, steps=4, rate=3.0)
    assert raised.value.exit_code == 1
    assert not list(tmp_path.glob("to*"))


def test_what_cannot_be_cut_is_refused(model, random_model_dir, ids, tmp_path):
    to = tmp_path / "to"
    for layers in (0, 4, 5):
        with pytest.raises(PlanError, match=f"has 4 layers, and a draft cannot be the first {layers}") as raised:
            planned(model, to, ids, layers=layers)
        assert raised.value.hint == "use --layers 3 or less"
    with pytest.raises(PlanError, match="depend on its number"):
        planned(random_model_dir("gpt2", scale_attn_by_inverse_layer_idx=True), to, ids, layers=1)
    with pytest.raises(PlanError, match="--samples 16 and --written 0 leave too few windows"):
        planned(model, to, ids, samples=16)
    with pytest.raises(PlanError, match="without which it writes no text"):
        planned(model, to, ids, written=16)
    with pytest.raises(PlanError, match="is the model itself"):
        planned(model, model, ids, overwrite=True)
    assert not list(tmp_path.glob("to*"))
