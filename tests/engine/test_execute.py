"""The engine on a tiny trained model: what it writes, that it goes on after being cut off, that it says what it did."""

import json
import os
import shutil

import pytest
import torch
from safetensors import safe_open

from forkserver import PROCESSES
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.process.progress import Progress
from llmcompress.errors import CheckpointError, PlanError, RecipeError, StoppedError
from llmcompress.recipe import parse
from llmcompress.store.staging import Staging
from tinyruns import FEW, after, compress, digest, recipe


@pytest.fixture(scope="module")
def finished(shallow_model_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "out"
    compress(shallow_model_dir, out)
    return out


@pytest.mark.parametrize("method", ["gptq", "rtn"])
@pytest.mark.parametrize("count", range(FEW))
def test_a_run_stopped_after_any_layer_goes_on_to_the_same_bytes(shallow_model_dir, finished, tmp_path, method, count):
    whole, resumed = finished if method == "gptq" else tmp_path / "whole", tmp_path / "resumed"
    if method == "rtn":
        compress(shallow_model_dir, whole, recipe(method))
    with pytest.raises(StoppedError) as stopped:
        compress(shallow_model_dir, resumed, recipe(method), stop=after(count))
    assert stopped.value.exit_code == 75
    assert not resumed.exists()
    seen = []

    class Watch(Progress):
        def layer(self, number):
            seen.append(number)

    compress(shallow_model_dir, resumed, recipe(method), progress=Watch())
    assert seen == list(range(count, FEW))
    assert digest(whole) == digest(resumed)
    assert not (tmp_path / "resumed.work").exists()


def die_after(model, out, step, when):
    """In a process of its own: a run that ends without a word once a layer's section or hidden states are kept."""
    original = getattr(Staging, step)

    def wrapped(self, number, *rest):
        result = original(self, number, *rest)
        if number == when:
            os._exit(9)
        return result

    setattr(Staging, step, wrapped)
    compress(model, out)


@pytest.mark.parametrize(
    ("step", "when"), [("write_section", 0), ("keep_hidden", 0), ("write_section", 1), ("keep_hidden", 1)]
)
def test_a_killed_run_goes_on_to_the_same_bytes(shallow_model_dir, finished, tmp_path, step, when):
    out = tmp_path / "out"
    killed = PROCESSES.Process(target=die_after, args=(shallow_model_dir, out, step, when))
    killed.start()
    killed.join(300)
    assert killed.exitcode == 9
    assert not out.exists()
    compress(shallow_model_dir, out)
    assert digest(out) == digest(finished)


def test_damaged_hidden_states_are_not_believed(shallow_model_dir, finished, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(StoppedError):
        compress(shallow_model_dir, out, stop=after(1))
    states, _ = sorted((tmp_path / "out.work").glob("hidden-*.bin"))
    data = bytearray(states.read_bytes())
    data[100] ^= 1
    states.write_bytes(data)
    compress(shallow_model_dir, out)
    assert digest(out) == digest(finished)


def test_two_runs_give_the_same_bytes_and_leave_random_state_alone(shallow_model_dir, finished, tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    compress(shallow_model_dir, tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), before)
    assert digest(tmp_path / "again") == digest(finished)


def test_a_work_directory_refuses_another_recipe_and_names_the_difference(shallow_model_dir, tmp_path):
    with pytest.raises(StoppedError):
        compress(shallow_model_dir, tmp_path / "out", stop=after(1))
    with pytest.raises(PlanError, match=r"recipe\.steps\[0\]\.bits was 4, now 3"):
        compress(shallow_model_dir, tmp_path / "out", recipe(format_="gptq", bits=3))


def test_the_output_is_complete_and_its_size_was_planned(shallow_model_dir, finished):
    plan = make_plan(recipe(), shallow_model_dir, Options(out=finished.with_name("other")))
    weights = [file for file in finished.iterdir() if file.name.startswith("model")]
    assert sum(file.stat().st_size for file in weights) == plan.estimate.output_bytes
    for name in (
        "config.json",
        "report.json",
        "llmcompress.yaml",
        "README.md",
        "tokenizer.json",
        "generation_config.json",
    ):
        assert (finished / name).exists(), name
    report = json.loads((finished / "report.json").read_text())
    assert len(report["linears"]) == 7 * FEW
    with safe_open(finished / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(report["tensors"]) == {tensor.name for tensor in plan.tensors}
    assert str(shallow_model_dir.parent) not in (finished / "report.json").read_text()


def test_gptq_is_more_faithful_than_rounding(shallow_model_dir, finished, tmp_path):
    gptq = json.loads((finished / "report.json").read_text())["linears"]
    made = recipe(actorder="none", descent=0, percdamp=0.99, clip="minmax")
    rough = compress(shallow_model_dir, tmp_path / "rough", made)["linears"]
    assert [item["name"] for item in gptq] == [item["name"] for item in rough]
    better = sum(a["loss"] < b["loss"] for a, b in zip(gptq, rough, strict=True))
    assert better >= 0.8 * len(gptq)


def test_the_result_carries_a_recipe_that_repeats_it(shallow_model_dir, finished, tmp_path):
    from llmcompress.recipe import load

    compress(shallow_model_dir, tmp_path / "again", load(finished / "llmcompress.yaml"))
    assert digest(tmp_path / "again") == digest(finished)


def test_options_by_pattern_reach_their_matrices(shallow_model_dir, tmp_path):
    made = recipe(set={"mlp.down_proj": {"bits": 8}, "layers.0.*": {"skip": True}})
    report = compress(shallow_model_dir, tmp_path / "out", made)
    grids = {item["name"]: item["grid"] for item in report["linears"]}
    assert not any(".layers.0." in name for name in grids)
    assert {grid for name, grid in grids.items() if "down_proj" in name} == {"int8-g64-sym"}
    assert {grid for name, grid in grids.items() if "down_proj" not in name} == {"int4-g64-sym"}
    assert sum(entry["kind"] == "unquantised" for entry in report["ledger"]) == 7


def test_default_group_size_falls_back_and_says_so(random_model_dir, tmp_path):
    model = random_model_dir("llama")  # width 64: 128 does not divide it
    made = parse(
        {"calibration": {"samples": 2, "length": 16}, "steps": [{"method": "rtn"}], "output": {"format": "dense"}}
    )
    plan = make_plan(made, model, Options(out=tmp_path / "out"))
    assert {matrix.method.group_size for layer in plan.layers for matrix in layer} == {32}
    assert [entry.kind for entry in plan.ledger] == ["group_size"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"group_size": 48},
            PlanError,
            "group size 48 does not divide the 256 inputs of model.layers.0.self_attn.q_proj",
        ),
        ({"format_": "awq", "bits": 8}, PlanError, "awq"),
        ({"set": {"nothing.here": {"bits": 8}}}, PlanError, "matches no matrix"),
        ({"set": {"mlp.*": {"bit": 8}}}, RecipeError, "did you mean 'bits'"),
        ({"set": {"*": {"skip": True}}}, PlanError, "nothing is left"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_read(shallow_model_dir, tmp_path, change, error, message):
    with pytest.raises(error) as refused:
        make_plan(recipe(**change), shallow_model_dir, Options(out=tmp_path / "out"))
    assert message in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_refused_or_replaced_whole(shallow_model_dir, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    for overwrite in (False, True):  # a directory that holds no model is never replaced
        with pytest.raises(PlanError, match=r"exists|does not hold a model"):
            make_plan(recipe("rtn"), shallow_model_dir, Options(out=out, overwrite=overwrite))
    (out / "config.json").write_text("{}")
    with pytest.raises(PlanError, match="exists"):
        make_plan(recipe("rtn"), shallow_model_dir, Options(out=out))
    assert (out / "mine.txt").read_text() == "precious"
    compress(shallow_model_dir, out, recipe("rtn"), overwrite=True)
    assert (out / "model.safetensors").exists()
    assert not (out / "mine.txt").exists()


def test_foreign_code_and_codes_of_unknown_formats_are_refused(shallow_model_dir, tmp_path):
    own_code = tmp_path / "model"
    shutil.copytree(shallow_model_dir, own_code)
    config = json.loads((own_code / "config.json").read_text())
    unknown = {**config, "quantization_config": {"quant_method": "aqlm"}}
    (own_code / "config.json").write_text(json.dumps(unknown))
    with pytest.raises(CheckpointError, match=r"already quantised \(aqlm\)"):
        make_plan(recipe(), own_code, Options(out=tmp_path / "out"))
    (own_code / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    with pytest.raises(CheckpointError, match="trust-remote-code"):
        make_plan(recipe(), own_code, Options(out=tmp_path / "out"))


def test_weights_that_are_not_finite_stop_the_run_by_name(shallow_model_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(shallow_model_dir, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds values that are not finite"
    ):
        compress(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_quantised_counted_and_helped_where_starved(random_model_dir, tmp_path, family):
    from llmcompress.calib.pack import save

    save(torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(0)), tmp_path / "ids.safetensors")
    calibration = {"source": str(tmp_path / "ids.safetensors"), "samples": 2, "length": 24}
    made = recipe(format_="dense", calibration=calibration, group_size=32)
    report = compress(random_model_dir(family), tmp_path / "out", made)
    experts = [item for item in report["linears"] if "experts" in item["name"]]
    assert len(experts) == 2 * 4 * 3
    assert all("tokens" in item for item in experts)
    starved = [entry for entry in report["ledger"] if entry["kind"] == "starved_expert"]
    assert starved
    routers = [entry for entry in report["ledger"] if "router" in entry["why"]]
    assert len(routers) == 2


def test_windows_sampled_from_the_model_are_kept_for_the_next_start(shallow_model_dir, tmp_path, monkeypatch):
    made = recipe(calibration={"source": "self", "samples": 4, "length": 16})
    whole = compress(shallow_model_dir, tmp_path / "whole", made)
    with pytest.raises(StoppedError):
        compress(shallow_model_dir, tmp_path / "out", made, stop=after(1))
    monkeypatch.setattr("llmcompress.engine.run.start.calibration_tokens", lambda plan: pytest.fail("sampled again"))
    assert compress(shallow_model_dir, tmp_path / "out", made)["tensors"] == whole["tensors"]
    assert not (tmp_path / "out.work").exists()
