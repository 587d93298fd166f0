"""Weights of tokens, against autograd on the whole model; runs that go by them stop and go on to the same bytes."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.run import token_weights
from llmcompress.engine.run.collect import SpaceStatistics
from llmcompress.errors import RunError, StoppedError
from llmcompress.model.gradients import drawn
from llmcompress.workers import SERIAL
from tinyruns import compress, digest, recipe

SAMPLES, LENGTH, SEED = 3, 16, 0
TOKENS = torch.randint(3, 96, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(7))


def guided(**options):
    text = {"samples": SAMPLES, "length": LENGTH, "seed": SEED}
    return recipe("gptq", calibration=text, **{"guided": True, **options})


def kept_weights(model, out, **options):
    """Weights by layer and space that a run on `TOKENS` leaves in its work directory."""
    made = Options(out=out, keep_work=True, **options)
    run(make_plan(guided(group_size=32), model, made), tokens=TOKENS)
    files = sorted(out.with_name(f"{out.name}.work").glob("weights-*.safetensors"))
    return {int(file.stem[-5:]): load_file(file) for file in files}


def by_autograd(path, spaces):
    """Sums of squared gradients [samples * length] by layer and space, of the whole model. spaces: of paths."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    seen, sums = {}, {}
    for number, layer in enumerate(model.model.layers):
        for below in spaces:
            layer.get_submodule(below).register_forward_hook(
                lambda _, args, out, key=(number, below): seen.__setitem__(key, out)
            )
    for window, ids in enumerate(TOKENS):
        logs = model(input_ids=ids[None]).logits.log_softmax(-1)[0]
        labels = drawn(logs.detach().exp(), torch.Generator().manual_seed(SEED + window))
        keys = list(seen)
        found = torch.autograd.grad(logs.gather(1, labels[:, None]).sum(), [seen[key] for key in keys])
        for (number, below), gradient in zip(keys, found, strict=True):
            key = number, spaces[below]
            sums.setdefault(key, torch.zeros(SAMPLES, LENGTH))
            sums[key][window] += gradient[0].square().sum(-1)
    return {key: value.flatten() for key, value in sums.items()}


def test_weights_are_roots_of_squared_gradients_of_the_whole_model(random_model_dir, tmp_path):
    path = random_model_dir("llama", dtype="float32")
    found = kept_weights(path, tmp_path / "out", compute_dtype="float32")
    plan = make_plan(guided(group_size=32), path, Options(out=tmp_path / "other"))
    expected = by_autograd(path, token_weights.weighed_paths(plan, 0))
    assert {(number, space) for number in found for space in found[number]} == expected.keys()
    for (number, space), sums in expected.items():
        roots = sums.sqrt()
        torch.testing.assert_close(found[number][space], roots / roots.mean(), rtol=2e-3, atol=2e-3)


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


def test_damaged_weights_are_not_believed(shallow_model_dir, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(StoppedError):
        compress(shallow_model_dir, out, guided(), stop=lambda done: done == 1)
    file = out.with_name("out.work") / "weights-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(RunError, match=r"weights-00001.safetensors is damaged"):
        compress(shallow_model_dir, out, guided())


def test_experts_have_no_weights_and_the_matrices_around_them_do(random_model_dir, tmp_path):
    path = random_model_dir("mixtral", dtype="float32")
    found = kept_weights(path, tmp_path / "out")
    assert all(found.values())
    assert not any("expert" in space for spaces in found.values() for space in spaces)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert any("experts" in record["name"] for record in report["linears"])


def test_tokens_of_no_one_place_have_no_weight():
    gathered = token_weights.SpaceGradients({"a": "one", "b": "other"}, (1, 4))
    gathered.add("a", gathered.part(torch.zeros(4, 2), torch.tensor([[1.0], [2.0], [3.0], [6.0]])), 0)
    gathered.add("b", gathered.part(torch.zeros(3, 2), torch.ones(3, 2)), 0)
    found = gathered.weights()
    assert found.keys() == {"one"}
    torch.testing.assert_close(found["one"], torch.tensor([1.0, 2.0, 3.0, 6.0]) / 3)


def test_gradients_that_are_not_finite_are_refused_by_name():
    gathered = token_weights.SpaceGradients({"a": "attn_in"}, (1, 2))
    gathered.add("a", gathered.part(torch.zeros(2, 2), torch.tensor([[1.0], [float("inf")]])), 0)
    with pytest.raises(RunError, match="the gradients of attn_in are not finite"):
        gathered.weights()


def test_nothing_is_left_of_the_gradients(shallow_model_dir, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(StoppedError):
        compress(shallow_model_dir, out, guided(), stop=lambda done: done == 1)
    names = [file.name for file in out.with_name("out.work").iterdir()]
    assert not [name for name in names if name.startswith(("record-entering", "record-gradient"))]
