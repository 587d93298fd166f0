"""What gradients say, against autograd on the whole model; runs that go by it stop and go on to the same bytes."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llmcompress.engine.execute import run
from llmcompress.engine.plan import estimate
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.matrix_plan import followed
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.run import guidance
from llmcompress.engine.run.collect import SpaceStatistics
from llmcompress.errors import RunError, StoppedError
from llmcompress.model.gradients import drawn
from llmcompress.solve import output_feedback
from llmcompress.stats import gram
from llmcompress.store.statistics import all_statistics
from llmcompress.workers import SERIAL
from tinyruns import compress, digest, kl, recipe, steps_recipe

SAMPLES, LENGTH, SEED = 3, 16, 0
TOKENS = torch.randint(3, 96, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(7))


def guided(**options):
    text = {"samples": SAMPLES, "length": LENGTH, "seed": SEED}
    return recipe("gptq", **{"calibration": text, "guided": True, **options})


def kept_guidance(model, out, **options):
    """What a run on `TOKENS` leaves in its work directory, by layer: weights by space, and products by path."""
    made = Options(out=out, keep_work=True, **options)
    run(make_plan(guided(group_size=32), model, made), tokens=TOKENS)
    files = sorted(out.with_name(f"{out.name}.work").glob("guidance-*.safetensors"))
    found = {int(file.stem[-5:]): guidance._read(load_file(file)) for file in files}
    return {key: each.tokens for key, each in found.items()}, {key: each.outputs for key, each in found.items()}


def by_autograd(path, paths, tokens):
    """Gradients [samples * length, out] by layer and path, of the whole model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    seen, gradients = {}, {}
    for number, layer in enumerate(model.model.layers):
        for below in paths:
            layer.get_submodule(below).register_forward_hook(
                lambda _, args, out, key=(number, below): seen.__setitem__(key, out)
            )
    for window, ids in enumerate(tokens):
        logs = model(input_ids=ids[None]).logits.log_softmax(-1)[0]
        labels = drawn(logs.detach().exp(), torch.Generator().manual_seed(SEED + window))
        keys = list(seen)
        found = torch.autograd.grad(logs.gather(1, labels[:, None]).sum(), [seen[key] for key in keys])
        for key, gradient in zip(keys, found, strict=True):
            gradients.setdefault(key, []).append(gradient[0])
    return {key: torch.cat(value) for key, value in gradients.items()}


@pytest.mark.parametrize(("least", "windows"), [(48, [0, 1, 2]), (24, [0, 2])])
def test_weights_and_products_are_those_of_gradients_of_the_whole_model(
    random_model_dir, tmp_path, monkeypatch, least, windows
):
    """Tokens of windows that are left out have the mean weight."""
    monkeypatch.setattr(output_feedback, "OUTPUTS", 40)
    monkeypatch.setattr(gram, "_PANEL", 16)
    monkeypatch.setattr(estimate, "GRADIENT_TOKENS", least)
    path = random_model_dir("llama", dtype="float32")
    weights, products = kept_guidance(path, tmp_path / "out", compute_dtype="float32")
    spaces = guidance.weighed_paths(make_plan(guided(group_size=32), path, Options(out=tmp_path / "other")).layers[0])
    gradients = by_autograd(path, spaces, TOKENS[windows])
    assert {(number, path) for number in products for path in products[number]} == gradients.keys()
    sums = {}
    for (number, below), gradient in gradients.items():
        key = number, spaces[below]
        sums[key] = sums.get(key, 0) + gradient.square().sum(-1)
        some = gradient.split(40, dim=1)
        for found, part in zip(products[number][below], some, strict=True):
            expected = part.T @ part / len(part)
            torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))
    assert {(number, space) for number in weights for space in weights[number]} == sums.keys()
    for (number, space), squares in sums.items():
        roots = squares.sqrt()
        expected = torch.ones(SAMPLES, LENGTH)
        expected[windows] = (roots / roots.mean()).view(-1, LENGTH)
        torch.testing.assert_close(weights[number][space], expected.flatten(), rtol=2e-3, atol=2e-3)


def test_gram_matrix_and_drift_count_tokens_by_their_weights():
    plan = SimpleNamespace(entry=SimpleNamespace(in_features=8, inputs=None), needs=frozenset({"gram", "absmax"}))
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(32, generator=generator) * 2
    original = torch.randn(32, 8, generator=generator)
    x = original + 0.1 * torch.randn(32, 8, generator=generator)
    found = SpaceStatistics([plan], SERIAL, torch.device("cpu"), 0, paired=True, weights=weights)
    for part in (slice(0, 16), slice(16, 32)):  # two batches of windows of eight tokens
        found.update(x[part].view(2, 8, 8), original[part].view(2, 8, 8), 8)
    here, there, counts = x.double(), original.double(), torch.diag(weights.double())
    torch.testing.assert_close(found.alone["gram"].mean().double(), here.T @ counts @ here / 32, rtol=1e-5, atol=1e-6)
    drift = (there - here).T @ counts @ here / 32
    torch.testing.assert_close(found.paired["drift"].finish().double(), drift, rtol=1e-4, atol=1e-5)
    assert found.alone["absmax"].peak == x.view(4, 8, 8)[:, 1:].abs().max()


@pytest.fixture(scope="module")
def finished(shallow_model_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("guided") / "out"
    compress(shallow_model_dir, out, guided())
    return out


def test_weights_change_the_codes(shallow_model_dir, finished, tmp_path):
    compress(shallow_model_dir, tmp_path / "out", guided(guided=False))
    assert digest(tmp_path / "out") != digest(finished)


def test_a_run_stopped_within_the_gradients_goes_on_to_the_same_bytes(shallow_model_dir, finished, tmp_path):
    out = tmp_path / "out"
    for done in range(1, 5):  # each start makes one step
        with pytest.raises(StoppedError, match=f"{done} of 5 steps of the gradients done"):
            compress(shallow_model_dir, out, guided(), stop=lambda finished: True)
    compress(shallow_model_dir, out, guided())
    assert digest(out) == digest(finished)


def test_the_number_of_threads_changes_nothing(shallow_model_dir, finished, tmp_path):
    compress(shallow_model_dir, tmp_path / "out", guided(), threads=2)
    assert digest(tmp_path / "out") == digest(finished)


def test_gradients_kept_by_another_run_give_the_same_bytes_without_a_pass(
    shallow_model_dir, finished, tmp_path, monkeypatch
):
    store = tmp_path / "store"
    compress(shallow_model_dir, tmp_path / "three", guided(bits=3), stats=store)
    (kept,) = [entry for entry in all_statistics(store) if entry.steps == ["gradients"]]
    assert kept.complete
    gone = kept.path / "layer-00001.safetensors"
    aside = gone.rename(tmp_path / gone.name)
    with pytest.raises(StoppedError, match="1 of 5 steps of the gradients"):  # they are not all there
        compress(shallow_model_dir, tmp_path / "part", guided(), stats=store, stop=lambda finished: True)
    aside.rename(gone)
    monkeypatch.setattr(guidance, "fisher_information", None)
    compress(shallow_model_dir, tmp_path / "out", guided(), stats=store)
    assert digest(tmp_path / "out") == digest(finished)


@pytest.mark.parametrize("change", [{"seed": 1}, {"samples": 4}])
def test_gradients_of_other_text_are_not_taken(shallow_model_dir, tmp_path, change):
    store = tmp_path / "store"
    compress(shallow_model_dir, tmp_path / "out", guided(), stats=store)
    other = guided(calibration={"samples": SAMPLES, "length": LENGTH, "seed": SEED} | change)
    with pytest.raises(StoppedError, match="1 of 5 steps of the gradients"):
        compress(shallow_model_dir, tmp_path / "other", other, stats=store, stop=lambda finished: True)


def test_gradients_of_a_rotated_model_are_its_own(shallow_model_dir, tmp_path, main, capsys):
    """Whatever the store has got of the model as it was."""
    gptq = {"method": "gptq", "bits": 4, "group_size": 64, "guided": True}
    rotated = steps_recipe([{"method": "rotate"}, gptq])
    compress(shallow_model_dir, tmp_path / "alone", rotated)
    compress(shallow_model_dir, tmp_path / "scaled", steps_recipe([{"method": "awq"}, gptq]), stats=tmp_path / "store")
    compress(shallow_model_dir, tmp_path / "out", rotated, stats=tmp_path / "store")
    assert digest(tmp_path / "out") == digest(tmp_path / "alone")
    assert main("stats", "list", tmp_path / "store") == 0
    assert "rotate, gradients" in capsys.readouterr().out


def test_damaged_gradients_of_another_run_are_not_believed(shallow_model_dir, tmp_path):
    store = tmp_path / "store"
    compress(shallow_model_dir, tmp_path / "out", guided(), stats=store)
    (kept,) = [entry for entry in all_statistics(store) if entry.steps == ["gradients"]]
    file = kept.path / "layer-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(RunError, match=r"layer-00001.safetensors is damaged"):
        compress(shallow_model_dir, tmp_path / "other", guided(bits=3), stats=store)


def test_damaged_weights_are_not_believed(shallow_model_dir, finished, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(StoppedError):
        compress(shallow_model_dir, out, guided(), stop=lambda done: done == 1)
    file = out.with_name("out.work") / "guidance-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(RunError, match=r"guidance-00001.safetensors is damaged"):
        compress(shallow_model_dir, out, guided())
    file.unlink()  # as the hint says
    compress(shallow_model_dir, out, guided())
    assert digest(out) == digest(finished)


def test_experts_have_no_weights_and_the_matrices_around_them_do(random_model_dir, tmp_path):
    path = random_model_dir("mixtral", dtype="float32")
    weights, products = kept_guidance(path, tmp_path / "out")
    assert all(weights.values())
    assert all(products.values())
    assert not any("expert" in name for found in (weights, products) for names in found.values() for name in names)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert any("experts" in record["name"] for record in report["linears"])
    assert [entry["subject"] for entry in report["ledger"] if entry["kind"] == "guided"] == ["24 of 32 matrices"]


@pytest.mark.parametrize(
    ("step", "count"),
    [
        ({"method": "wanda", "sparsity": 0.5}, 14),
        ({"method": "sparsegpt", "sparsity": 0.5, "joint": True}, 0),
        ({"method": "awq"}, 0),
    ],
    ids=["pruned before", "pruned meanwhile", "scaled"],
)
def test_errors_at_outputs_that_are_scaled_or_chosen_to_go_are_not_made_up_for(
    shallow_model_dir, tmp_path, step, count
):
    gptq = {"method": "gptq", "bits": 4, "group_size": 64, "guided": True}
    plan = make_plan(steps_recipe([step, gptq], "compressed-tensors"), shallow_model_dir, Options(out=tmp_path / "out"))
    assert sum(len(followed(plan.recipe, layer)) for layer in plan.layers) == count
    said = [entry.subject for entry in plan.ledger if entry.kind == "guided"]
    assert said == ([] if count == 14 else ["14 of 14 matrices"])


@pytest.mark.parametrize(("samples", "passes"), [(512, 2 + 3), (1023, 2 + 3), (1024, 2 + 2), (2048, 2 + 1)])
def test_the_plan_counts_the_windows_that_gradients_are_of(shallow_model_dir, tmp_path, samples, passes):
    """Of 128 tokens each: all of them, every second or every fourth one; three passes of all, half or a quarter."""
    text = {"samples": samples, "length": 128}
    plan = make_plan(guided(calibration=text), shallow_model_dir, Options(out=tmp_path / "out"))
    assert plan.estimate.passes == passes


def test_a_head_has_no_outputs_to_follow(shallow_model_dir, tmp_path):
    made = recipe("gptq", format_="mlx", bits=4, group_size=64, guided=True, head_bits=4)
    plan = make_plan(made, shallow_model_dir, Options(out=tmp_path / "out"))
    head = [matrix for matrix in plan.matrices if not matrix.inside]
    assert [matrix.method.guided for matrix in head] == [True]
    assert not followed(plan.recipe, head)


def test_divergence_falls_by_a_third(shallow_model_dir, windows, tmp_path):
    text = {"samples": 32, "length": 64}
    found = {}
    for said in (False, True):
        made = recipe("gptq", calibration=text, bits=3, group_size=32, guided=said)
        compress(shallow_model_dir, tmp_path / f"{said}", made)
        found[said] = kl(tmp_path / f"{said}", shallow_model_dir, windows)
    assert found[True] < found[False] / 1.5


def test_tokens_of_no_one_place_have_no_weight():
    gathered = guidance.LayerGuidance({"a": "one", "b": "other"}, (), (1, 4))
    gathered.add("a", gathered.part("a", torch.zeros(4, 2), torch.tensor([[1.0], [2.0], [3.0], [6.0]]), 0), 0)
    gathered.add("b", gathered.part("b", torch.zeros(3, 2), torch.ones(3, 2), 0), 0)
    found = gathered.weights()
    assert found.keys() == {"one"}
    torch.testing.assert_close(found["one"], torch.tensor([1.0, 2.0, 3.0, 6.0]) / 3)


def test_gradients_that_are_not_finite_are_refused_by_name():
    gathered = guidance.LayerGuidance({"a": "attn_in"}, (), (1, 2))
    gathered.add("a", gathered.part("a", torch.zeros(2, 2), torch.tensor([[1.0], [float("inf")]]), 0), 0)
    with pytest.raises(RunError, match="the gradients of attn_in are not finite"):
        gathered.weights()


def test_nothing_is_left_of_a_finished_run(finished):
    assert not finished.with_name(f"{finished.name}.work").exists()


def test_nothing_is_left_of_the_gradients(shallow_model_dir, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(StoppedError):
        compress(shallow_model_dir, out, guided(), stop=lambda done: done == 1)
    names = [file.name for file in out.with_name("out.work").iterdir()]
    assert not [name for name in names if name.startswith(("record-entering", "record-gradient"))]
