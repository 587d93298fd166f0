"""The layer as it was, beside the layer that codes come into."""

import torch
from torch import nn

from llmcompress.engine.run.loop import _as_it_is


def test_a_layer_that_stays_as_it_is_takes_memory_only_for_what_changes():
    layer = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    layer[1].tied = layer[0].weight
    kept = _as_it_is(layer)
    before = [weight.data_ptr() for weight in kept.parameters()]
    assert before == [weight.data_ptr() for weight in layer.parameters()]
    assert kept[1].tied is kept[0].weight
    was = layer[0].weight.clone()
    layer[0].weight.data = torch.zeros(4, 3)
    assert torch.equal(kept[0].weight, was)
    assert not layer[1].tied.any()
    assert [weight.data_ptr() for weight in kept.parameters()] == before
