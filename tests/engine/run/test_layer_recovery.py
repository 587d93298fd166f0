"""Scales and gains fitted layer by layer: true gradients, a nearer model, the same codes, and the same bytes again."""

import json
import math
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

from ggufmodels import small_config
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.run import layer_recovery
from llmcompress.engine.run.guidance import NONE, Guidance
from llmcompress.engine.train.training import Look, NoGainError
from llmcompress.errors import PlanError, StoppedError
from llmcompress.npzfile import read_arrays
from llmcompress.recipe import KvCache
from llmcompress.validate.verify import passed, verify
from tinyruns import after, compress, digest, kl, recipe, steps_recipe

TEXT = {"samples": 32, "length": 64}
IDS = torch.randint(3, 96, (32, 16), generator=torch.Generator().manual_seed(7))  # for random models
STEP = 0.004  # of logarithms: more than 16 bits round them by


def recovered(**options):
    return recipe(**{"bits": 3, "group_size": 32, "calibration": TEXT, "recover": "block", **options})


class Checked:
    """In place of training: gradients are compared with differences of the divergence, and nothing is learnt."""

    seen: ClassVar[list[int]] = []

    def __init__(self, learner, text, *rest):
        self.learner, self.looks = learner, [Look(0, {"calibration": 1.0})]

    def run(self, staged):
        windows = [0, 3, 5]
        mean, slopes = self.learner.gradients(windows)
        trained = self.learner.trained
        assert mean == pytest.approx(self.learner.divergence(windows), rel=1e-5)
        assert all(slope.shape == trained[name].learnt.shape for name, slope in slopes.items())
        for kind in (2, 1):  # scales of matrices, then gains
            chosen = {name: slope for name, slope in slopes.items() if trained[name].learnt.dim() == kind}
            found = []
            for way in (STEP, -STEP):
                for name, slope in chosen.items():
                    trained[name].learnt = way * slope.sign()
                found.append(self.learner.divergence(windows))
            for name in chosen:
                trained[name].learnt = torch.zeros_like(trained[name].learnt)
            expected = sum(float(slope.abs().sum()) for slope in chosen.values())
            assert (found[0] - found[1]) / (2 * STEP) == pytest.approx(expected, rel=0.03)
        self.seen.append(len(slopes))
        raise NoGainError("nothing is learnt", "")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_gradients_are_those_of_differences(family, random_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_recovery, "Training", Checked)
    monkeypatch.setattr(Checked, "seen", [])
    made = recovered(format_="gptq", calibration={"samples": 32, "length": 16})
    run(
        make_plan(
            made, random_model_dir(family, dtype="float32"), Options(out=tmp_path / "out", compute_dtype="float32")
        ),
        tokens=IDS,
    )
    assert Checked.seen == [{"llama": 9, "gpt2": 6, "gemma2": 11, "mixtral": 18}[family]] * 2
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [layer["best_step"] for layer in report["recovered_layers"]] == [0, 0]
    assert not (tmp_path / "out" / "transforms.npz").exists()
    assert not any(item.get("recovered") for item in report["linears"])


class Judged(Checked):
    """In place of training: the divergence is that of hidden states, and of nothing that travels with them."""

    def run(self, staged):
        learner = self.learner
        self.learner.divergence([0])
        given = learner.model.call(learner.number, learner.layer, learner._read(0))
        wanted = learner._leaving.read(slice(0, 1))
        shares = (given - wanted)[..., :64].square().sum(-1) / wanted[..., :64].square().sum(-1)
        assert learner.divergence([0]) == pytest.approx(float(shares.mean().detach()), rel=1e-4)
        self.seen.append(given.shape[-1] - 64)
        raise NoGainError("nothing is learnt", "")


def test_what_travels_with_hidden_states_is_not_judged(random_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_recovery, "Training", Judged)
    monkeypatch.setattr(Checked, "seen", [])
    config = small_config("glm_moe_dsa") | {"index_topk": 8, "hidden_size": 64}
    path = random_model_dir("glm_moe_dsa", dtype="float32", **config)
    made = recovered(group_size=-1, format_="dense", calibration={"samples": 32, "length": 16})
    run(make_plan(made, path, Options(out=tmp_path / "out", compute_dtype="float32")), tokens=IDS)
    assert any(Checked.seen)


class Overflown(Checked):
    """In place of training: what leaves the layer is no number."""

    def __init__(self, learner, text, *rest):
        super().__init__(learner, text, *rest)
        self.looks = [Look(0, {"calibration": math.nan})]

    def run(self, staged):
        raise NoGainError("nothing is learnt", "")


def test_a_layer_that_cannot_be_judged_is_left_and_named(shallow_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_recovery, "Training", Overflown)
    report = compress(shallow_model_dir, tmp_path / "out", recovered())
    assert "recovered_layers" not in report
    said = {entry["subject"]: entry["why"] for entry in report["ledger"] if entry["kind"] == "untrained"}
    assert said.keys() == {"layer 0", "layer 1"}
    assert all("not finite" in why for why in said.values())
    assert passed(verify(tmp_path / "out", shallow_model_dir))


@pytest.fixture(scope="module")
def finished(shallow_model_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("recovered") / "out"
    compress(shallow_model_dir, out, recovered())
    return out


def test_divergence_falls_and_all_that_was_trained_is_recorded(shallow_model_dir, finished, windows, tmp_path):
    compress(shallow_model_dir, tmp_path / "out", recovered(recover="none", qep_samples=TEXT["samples"]))
    assert kl(finished, shallow_model_dir, windows) < 0.97 * kl(tmp_path / "out", shallow_model_dir, windows)
    assert passed(verify(finished, shallow_model_dir))
    report = json.loads((finished / "report.json").read_text())
    for number, layer in enumerate(report["recovered_layers"]):
        assert layer["layer"] == number
        assert layer["error"] < layer["error_before"]
        assert layer["best_step"] > 0
    assert all(item["recovered"] and "loss" not in item for item in report["linears"])
    assert read_arrays(finished / "transforms.npz").keys() == {
        f"model.layers.{number}.{norm}.weight/0"
        for number in (0, 1)
        for norm in ("input_layernorm", "post_attention_layernorm")
    }


def test_scales_and_gains_of_the_first_layer_move_and_codes_stay(shallow_model_dir, finished, tmp_path):
    compress(shallow_model_dir, tmp_path / "out", recovered(recover="none", qep_samples=TEXT["samples"]))
    one, other = (load_file(place / "model.safetensors") for place in (finished, tmp_path / "out"))
    first = [name for name in one if ".layers.0." in name]
    moved = {name.rpartition(".")[2] for name in first if not torch.equal(one[name], other[name])}
    assert moved == {"weight_scale", "weight"}
    assert all(torch.equal(one[name], other[name]) for name in first if name.endswith("weight_packed"))


def test_a_stopped_run_goes_on_to_the_same_bytes(shallow_model_dir, finished, tmp_path):
    with pytest.raises(StoppedError):
        compress(shallow_model_dir, tmp_path / "out", recovered(), stop=after(1))
    compress(shallow_model_dir, tmp_path / "out", recovered())
    assert digest(tmp_path / "out") == digest(finished)


def test_the_number_of_threads_changes_nothing(shallow_model_dir, finished, tmp_path):
    compress(shallow_model_dir, tmp_path / "out", recovered(), threads=2)
    assert digest(tmp_path / "out") == digest(finished)


def test_what_gains_nothing_changes_nothing(shallow_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_recovery, "_SHARE", 1e3)
    compress(shallow_model_dir, tmp_path / "out", recovered())
    compress(shallow_model_dir, tmp_path / "plain", recovered(recover="none", qep_samples=TEXT["samples"]))
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("out", "plain")]
    assert reports[0]["tensors"] == reports[1]["tensors"]
    assert reports[0]["linears"] == reports[1]["linears"]
    assert {layer["best_step"] for layer in reports[0]["recovered_layers"]} == {0}


BESIDE = {
    "behind factors of channels": [{"method": "awq"}, {"method": "gptq", "bits": 3, "group_size": 32}],
    "rotated": [{"method": "rotate"}, {"method": "gptq", "bits": 3, "group_size": 32}],
    "rounded inputs": [{"method": "gptq", "bits": 8, "group_size": -1, "activations": "int8-tensor"}],
    "guided": [{"method": "gptq", "bits": 3, "group_size": 32, "guided": True}],
    "gains alone": [{"method": "gptq", "type": "nvfp4"}],
    "zeros": [{"method": "sparsegpt", "pattern": "2:4"}, {"method": "gptq", "bits": 3, "group_size": 32}],
}


@pytest.mark.parametrize("case", BESIDE)
def test_other_steps_may_come_before(case, shallow_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(Look, "gains", lambda self, first: self.step > 0)  # whatever was learnt of so little text
    *before, last = BESIDE[case]
    made = steps_recipe([*before, {**last, "recover": "block"}], "compressed-tensors", calibration=TEXT)
    report = compress(shallow_model_dir, tmp_path / "out", made)
    assert all(layer["best_step"] for layer in report["recovered_layers"])
    assert passed(verify(tmp_path / "out", shallow_model_dir))
    untrained = [entry for entry in report["ledger"] if entry["kind"] == "untrained"]
    assert len(untrained) == (14 if case == "gains alone" else 0)
    if case == "behind factors of channels":
        with pytest.raises(StoppedError):
            compress(shallow_model_dir, tmp_path / "again", made, stop=after(1))
        compress(shallow_model_dir, tmp_path / "again", made)
        assert digest(tmp_path / "again") == digest(tmp_path / "out")


def test_scales_of_caches_are_those_of_the_layer_as_it_is_written(shallow_model_dir, tmp_path):
    reports = []
    for settings in ({"recover": "none", "qep_samples": TEXT["samples"]}, {}):
        made = recovered(**settings)
        made = made.model_copy(update={"kv_cache": KvCache(code="fp8")})
        reports.append(compress(shallow_model_dir, tmp_path / made.method.recover, made))
    plain, moved = (report["kv_cache"]["largest"] for report in reports)
    assert all(one != other for one, other in zip(plain, moved, strict=True))
    tensors = load_file(tmp_path / "block" / "model.safetensors")
    assert float(tensors["model.layers.0.self_attn.k_scale"]) == pytest.approx(moved[0]["key"] / 448, rel=1e-2)


def test_errors_count_by_gradients_at_what_leaves_the_layer():
    generator = torch.Generator().manual_seed(1)
    missed, wanted, root = (torch.randn(1, 4, 6, generator=generator) for _ in range(3))
    products = [(root[0].T @ root[0])[:4, :4], torch.eye(2)]
    weights = torch.rand(3, 4, generator=generator)
    whole = torch.block_diag(*products).double()
    expected = 0.0
    for token in range(4):
        error, energy = missed[0, token].double(), wanted[0, token].double().square().sum()
        expected += float(weights[2, token] * (error @ whole @ error) / energy) / 4
    assert float(layer_recovery._Measure(weights, products).error(2, missed, wanted)) == pytest.approx(expected, 1e-5)
    alike = (missed.double().square().sum(-1) / wanted.double().square().sum(-1)).mean()
    assert float(layer_recovery._Measure().error(0, missed, wanted)) == pytest.approx(float(alike), 1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2", "mixtral"])
def test_gradients_are_gone_by_where_they_are_those_of_the_hidden_states(family, random_model_dir, tmp_path):
    plan = make_plan(recovered(guided=True), random_model_dir(family), Options(out=tmp_path / "out"))
    products = {matrix.path: [torch.eye(matrix.entry.out_features) * 4] for matrix in plan.layers[0]}
    weights = {matrix.space: torch.ones(32 * 64) for matrix in plan.layers[0] if matrix.expert is None}
    guidance = Guidance(weights, {path: found for path, found in products.items() if "experts" not in path})
    found = layer_recovery._measure(plan, 0, guidance)
    assert (found.channels is not None) == (family in ("llama", "gpt_neox"))
    if found.channels is not None:
        assert torch.equal(found.channels[0], 1.1 * torch.eye(len(found.channels[0])))
        assert found.tokens.shape == (32, 64)
    assert layer_recovery._measure(plan, 0, NONE) == layer_recovery._Measure()


def test_too_few_windows_are_refused_before_anything_is_read(shallow_model_dir, tmp_path):
    with pytest.raises(PlanError, match="--samples 31 leaves too few windows to hold some back"):
        make_plan(recovered(calibration={"samples": 31}), shallow_model_dir, Options(out=tmp_path / "out"))


def test_the_plan_counts_what_training_takes(shallow_model_dir, tmp_path):
    plans = [
        make_plan(recovered(**settings), shallow_model_dir, Options(out=tmp_path / "out"))
        for settings in ({"recover": "none", "qep_samples": 32}, {})
    ]
    assert [plan.estimate.passes for plan in plans] == [2, 2 + 3 * 64 * 4 // 32]
    assert plans[0].estimate.output_bytes == plans[1].estimate.output_bytes
