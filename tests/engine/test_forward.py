"""Both ways of running a layer give the same numbers, and neither leaves anything behind."""

import pytest
import torch

from llmcompress.engine.forward import Replayed, Stream, Suspended
from llmcompress.errors import RunError
from llmcompress.store.staging import Staging
from llmcompress.validate.load import open_streamed

SPACES = {
    "attn_in": "self_attn.q_proj",
    "attn_out": "self_attn.o_proj",
    "mlp_in": "mlp.gate_proj",
    "mlp_hidden": "mlp.down_proj",
}


@pytest.fixture
def ready(tiny_model_dir, tmp_path):
    """A model, and the hidden states of five windows in batches of two."""
    model = open_streamed(tiny_model_dir, dtype=torch.float32)
    ids = torch.randint(10, 500, (5, 12), generator=torch.Generator().manual_seed(0))
    states = model.embed(ids)
    staged = Staging(tmp_path / "work", {})
    hidden = staged.keep_hidden(0, tuple(states.shape), torch.float32, {"compressed": iter(states.split(2))})
    return model, hidden["compressed"]


def through(forward, layer):
    """Inputs of each stage and outputs, where every stage changes the weights it is followed by."""
    found = []
    for space, path in SPACES.items():
        found.append([batch[space].clone() for batch in forward.inputs({space: path})])
        layer.get_submodule(path).weight.data.mul_(1.25)
    found.append(list(forward.outputs()))
    forward.close()
    return found


@torch.no_grad()
def test_suspended_and_replayed_forwards_agree_to_the_bit(ready):
    model, hidden = ready
    results = []
    for kind in ("suspended", "replayed"):
        with model.layer(1) as layer:
            stream = Stream(layer, hidden)
            forward = Suspended(model, 1, stream, 2, SPACES) if kind == "suspended" else Replayed(model, 1, stream, 2)
            results.append(through(forward, layer))
            assert not any(module._forward_pre_hooks for module in layer.modules())
    for left, right in zip(*results, strict=True):
        assert len(left) == len(right) == 3
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@torch.no_grad()
def test_a_later_stage_sees_the_weights_an_earlier_one_changed(ready):
    model, hidden = ready
    with model.layer(0) as layer:
        changed = through(Suspended(model, 0, Stream(layer, hidden), 2, SPACES), layer)
    with model.layer(0) as layer:
        forward = Replayed(model, 0, Stream(layer, hidden), 2)
        plain = [[batch[space] for batch in forward.inputs({space: path})] for space, path in SPACES.items()]
    assert torch.equal(torch.cat(changed[0]), torch.cat(plain[0]))
    for stage in (1, 2, 3):
        assert not torch.allclose(torch.cat(changed[stage]), torch.cat(plain[stage]))


@torch.no_grad()
def test_a_declaration_in_the_wrong_order_is_noticed(ready):
    model, hidden = ready
    with model.layer(0) as layer:
        forward = Suspended(model, 0, Stream(layer, hidden), 2, SPACES)
        with pytest.raises(RunError, match="its declaration has another order"):
            list(forward.inputs({"mlp_in": SPACES["mlp_in"]}))
        forward.close()
