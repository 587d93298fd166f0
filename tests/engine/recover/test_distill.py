"""Divergence and gradients, one layer in memory at a time, are those of whole models under autograd."""

import pytest
import torch
from recovered import compressed, planned, write_ids

from llmcompress.engine.recover.distill import Distillation
from llmcompress.engine.recover.recovery import _opened
from llmcompress.engine.recover.trained_parts import TrainedParts
from llmcompress.engine.source.open import open_checkpoint
from llmcompress.engine.structure.source_model import embedded_windows, layer_outputs
from llmcompress.engine.train.trained import RANK, TrainedMatrix, TrainedWeight, TrainedWeights
from llmcompress.store.unfinished import claimed
from llmcompress.validate.load import load_whole
from llmcompress.workers import SERIAL

WINDOWS = [1, 4, 2]


def learner_of(plan, tokens, folder, workers):
    opened = plan.opened
    student, original = _opened(plan, opened.checkpoint, opened.matrices.spec), open_checkpoint(plan.original)
    parts = TrainedParts(plan, student)
    student.weights = TrainedWeights(opened.checkpoint, parts.by_name)
    teacher = _opened(plan, original, plan.matrices.spec)
    states = embedded_windows(teacher, tokens, 4, folder / "original.bin")
    for number in range(len(teacher.layers)):
        with teacher.layer(number) as layer:
            states = layer_outputs(teacher, number, layer, states, 4, folder / "original.bin", workers)
    return Distillation(student, teacher, states, tokens, parts.by_name, parts.places, workers)


def gradients(plan, folder, threads=1):
    tokens = plan.opened.tokens()
    with SERIAL.with_threads(threads) as workers:
        learner = learner_of(plan, tokens, folder, workers)
        with learner.heads():
            before = learner.divergence(WINDOWS)
            return tokens[WINDOWS], learner, before, *learner.gradients(WINDOWS)


def divergence(student, teacher, tokens):
    with torch.no_grad():
        wanted = teacher(tokens, use_cache=False).logits.log_softmax(-1)
    logs = student(tokens, use_cache=False).logits.log_softmax(-1)
    return (wanted.exp() * (wanted - logs)).sum(-1).mean()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_gradients_are_those_of_the_whole_model(family, random_model_dir, tmp_path):
    """At the start every factor is one: the slope at its logarithm sums value times gradient over its group."""
    model = random_model_dir(family, dtype="float32")
    out = compressed(model, tmp_path / "out", form="gptq" if family == "gpt2" else "compressed-tensors")
    plan = planned(out, model, tmp_path / "to", write_ids(tmp_path / "ids.safetensors"))
    with claimed(tmp_path / "work") as folder:
        tokens, learner, before, mean, found = gradients(plan, folder)
        folder.clear()
    student, teacher = (load_whole(path, dtype=torch.float32, linear=None) for path in (out, model))
    student.requires_grad_(True)
    whole = divergence(student, teacher, tokens)
    whole.backward()
    whole = whole.item()
    assert before == pytest.approx(whole, rel=1e-4)
    assert mean == pytest.approx(whole, rel=1e-4)
    known = dict(student.named_parameters())
    checked = set()
    for number, places in enumerate(learner.places):
        section = learner.student.spec.layers + f".{number}." if number < len(learner.student.layers) else ""
        for place in places:
            parameter, item = known[f"{section}{place.path}.weight"], learner.trained[place.name]
            if parameter.grad is None:  # an expert that no token came to
                continue
            if isinstance(item, TrainedMatrix):
                product = (parameter.data * parameter.grad).T if item.transposed else parameter.data * parameter.grad
                expected = product.reshape(len(product), item.learnt.shape[1], -1).sum(-1)
            else:
                expected = (parameter.data + item.offset) * parameter.grad
            slack = 2e-3 * float(expected.abs().max())
            assert torch.allclose(found[place.name], expected, rtol=1e-3, atol=slack), place
            checked.add(place.name)
    assert checked == found.keys()
    assert len(checked) == {"llama": 19, "gpt2": 13, "gemma2": 23, "mixtral": 37}[family]


@pytest.mark.parametrize("weights", ["full", "low-rank"])
def test_gradients_of_pruned_matrices_are_those_of_the_whole_model(weights, random_model_dir, tmp_path):
    model = random_model_dir("llama", dtype="float32")
    step = {"method": "magnitude", "sparsity": 0.5}
    out = compressed(model, tmp_path / "out", step, form="dense")
    plan = planned(out, model, tmp_path / "to", write_ids(tmp_path / "ids.safetensors"), weights=weights)
    tokens, generator = plan.opened.tokens(), torch.Generator().manual_seed(3)
    with claimed(tmp_path / "work") as folder, SERIAL.with_threads(1) as workers:
        learner = learner_of(plan, tokens, folder, workers)
        pruned = {name: item for name, item in learner.trained.items() if isinstance(item, TrainedWeight)}
        assert len(pruned) == 14
        base = {name: item.value() for name, item in pruned.items()}
        for item in pruned.values():  # from zero on, the signs would have no slope yet
            item.learnt += 0.3 * torch.randn(item.learnt.shape, generator=generator)
        with learner.heads():
            mean, found = learner.gradients(WINDOWS)
        folder.clear()
    student, teacher = (load_whole(path, dtype=torch.float32, linear=None) for path in (out, model))
    learnt = {name: item.learnt.clone().requires_grad_() for name, item in pruned.items()}
    state = {}
    for name, both in learnt.items():
        stays = base[name] != 0
        assert 0.49 < stays.float().mean() < 0.51
        first, second = both[:, : base[name].shape[1]], both[:, base[name].shape[1] :]
        change = both / 2 if weights == "full" else second.T @ first / RANK**0.5
        state[name] = (base[name] + base[name][stays].square().mean().sqrt() * change) * stays
        assert torch.equal(pruned[name].value() != 0, stays)  # no change met a weight exactly
        torch.testing.assert_close(pruned[name].value(), state[name], rtol=1e-4, atol=1e-6)
    logs = torch.func.functional_call(student, state, (tokens[WINDOWS],), {"use_cache": False}).logits.log_softmax(-1)
    with torch.no_grad():
        wanted = teacher(tokens[WINDOWS], use_cache=False).logits.log_softmax(-1)
    whole = (wanted.exp() * (wanted - logs)).sum(-1).mean()
    whole.backward()
    assert mean == pytest.approx(whole.item(), rel=1e-4)
    for name, both in learnt.items():
        slack = 2e-3 * float(both.grad.abs().max())
        assert torch.allclose(found[name], both.grad, rtol=1e-3, atol=slack), name


def test_threads_change_no_bit(random_model_dir, tmp_path):
    model = random_model_dir("llama")
    out = compressed(model, tmp_path / "out")
    plan = planned(out, model, tmp_path / "to", write_ids(tmp_path / "ids.safetensors"))
    seen = []
    for threads in (1, 2):
        with claimed(tmp_path / f"work{threads}") as folder:
            *_, mean, found = gradients(plan, folder, threads)
            folder.clear()
        seen.append((mean, found))
    (one, first), (two, second) = seen
    assert one == two
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first.keys() == second.keys()
