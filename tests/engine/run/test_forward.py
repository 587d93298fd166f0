"""Running a layer stage by stage: to the bit what a fresh run would give, with every costly module run once."""

import math

import pytest
import torch
from torch import nn

from llmcompress.engine.run.bypass import find_bypasses
from llmcompress.engine.run.forward import Forward, Recording, Stream
from llmcompress.store.staging import Staging
from llmcompress.validate.load import open_streamed
from llmcompress.workers import SERIAL

SPACES = {
    "attn_in": "self_attn.q_proj",
    "attn_out": "self_attn.o_proj",
    "mlp_in": "mlp.gate_proj",
    "mlp_hidden": "mlp.down_proj",
}
WINDOWS, BATCH = 5, 2


@pytest.fixture
def ready(tiny_model_dir, tmp_path):
    """A model, and the hidden states of five windows."""
    model = open_streamed(tiny_model_dir, dtype=torch.float32)
    ids = torch.randint(10, 500, (WINDOWS, 12), generator=torch.Generator().manual_seed(0))
    states = model.embed(ids)
    staged = Staging(tmp_path / "work", {})
    hidden = staged.keep_hidden(0, torch.float32, {"compressed": iter(states.split(BATCH))})
    return model, hidden.streams["compressed"], staged.folder


def forward(ready, layer, number=1, spaces=SPACES, workers=SERIAL):
    model, hidden, folder = ready
    return Forward(model, number, Stream("compressed", layer, hidden), BATCH, workers, Recording(folder, spaces))


def through(run, layer, spaces=SPACES):
    """Inputs of each stage and outputs, where every stage changes the weights it is followed by."""
    found = []
    for space, path in spaces.items():
        found.append([batch[space].clone() for batch in run.inputs({space: path})])
        layer.get_submodule(path).weight.data.mul_(1.25)
    found.append([out.clone() for out in run.outputs()])
    return found


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 3])
def test_what_was_recorded_changes_nothing_to_the_bit(ready, count):
    model = ready[0]
    results = []
    for spaces in (SPACES, {}):  # with bypasses, and every stage anew
        with model.layer(1) as layer, SERIAL.with_threads(count) as workers:
            results.append(through(forward(ready, layer, spaces=spaces, workers=workers), layer))
            assert not any(module._forward_pre_hooks or module._forward_hooks for module in layer.modules())
            assert not any("forward" in vars(module) for module in layer.modules())
    for left, right in zip(*results, strict=True):
        assert len(left) == len(right) == math.ceil(WINDOWS / BATCH)
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@torch.no_grad()
def test_attention_and_feed_forward_are_computed_once(ready):
    model = ready[0]
    with model.layer(1) as layer:
        run = forward(ready, layer)
        calls = {"self_attn.q_proj": 0, "self_attn.o_proj": 0, "mlp.down_proj": 0}

        def counter(name):
            def hook(*_):
                calls[name] += 1

            return hook

        handles = [layer.get_submodule(name).register_forward_hook(counter(name)) for name in calls]
        through(run, layer)
        for handle in handles:
            handle.remove()
    batches = math.ceil(WINDOWS / BATCH)
    assert calls == {"self_attn.q_proj": batches, "self_attn.o_proj": batches, "mlp.down_proj": batches}


@torch.no_grad()
def test_a_later_stage_sees_the_weights_an_earlier_one_changed(ready):
    model = ready[0]
    with model.layer(0) as layer:
        changed = through(forward(ready, layer, 0), layer)
    with model.layer(0) as layer:
        run = forward(ready, layer, 0)
        plain = [[batch[space] for batch in run.inputs({space: path})] for space, path in SPACES.items()]
    assert torch.equal(torch.cat(changed[0]), torch.cat(plain[0]))
    for stage in (1, 2, 3):
        assert not torch.allclose(torch.cat(changed[stage]), torch.cat(plain[stage]))


@torch.no_grad()
def test_a_module_that_does_more_after_its_matrix_is_run_in_full(ready):
    model = ready[0]
    with model.layer(1) as layer:
        attention = layer.self_attn
        plain = attention.forward
        attention.forward = lambda *args, **kwargs: tuple(
            value * 2 if isinstance(value, torch.Tensor) else value for value in plain(*args, **kwargs)
        )
        run = forward(ready, layer)
        assert {bypass.module for bypass in run.bypasses.found} == {"mlp"}
        del attention.forward


def test_a_module_that_joins_windows_before_it_multiplies_is_run_again():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.flat, self.whole = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))

        def forward(self, x):
            return self.flat(x.reshape(-1, 4)).view(x.shape) + self.whole(x)

    layer = Flat()
    found = find_bypasses(layer, {"a": "flat.0", "b": "whole.0"}, lambda: layer(torch.ones(1, 3, 4)))
    assert [bypass.module for bypass in found] == ["whole"]


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 3])
def test_a_concluded_stream_gives_what_leaves_the_layer_without_the_layer(ready, count):
    with ready[0].layer(1) as layer, SERIAL.with_threads(count) as workers:
        expected = [out.clone() for out in forward(ready, layer, workers=workers).outputs()]
        run = forward(ready, layer, workers=workers)
        stages = [list(run.inputs({space: path})) for space, path in SPACES.items()]
        run.conclude(onward=True)
        for weight in layer.parameters():
            weight.data.fill_(float("nan"))
        found = list(run.outputs())
    assert all(stages)
    assert not list(run.stream.layer.parameters())
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
