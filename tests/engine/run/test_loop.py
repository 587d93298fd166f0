"""The layer as it was, beside the layer that codes come into; layers that are finished, as a later start has them."""

import shutil

import pytest
import torch
from torch import nn

from llmcompress.engine.run.loop import _as_it_is
from llmcompress.errors import StoppedError
from madetokenizers import byte_level, save
from tinyruns import after, compress, digest, steps_recipe


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


STEPS = {
    "twice": [{"method": "smoothquant"}, {"method": "awq"}, {"method": "rtn", "group_size": 32}],
    "scores": [{"method": "smoothattention"}, {"method": "awq"}, {"method": "rtn", "group_size": 32}],
}


@pytest.mark.parametrize("case", STEPS)
def test_factors_of_several_steps_are_folded_alike_by_a_later_start(case, random_model_dir, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(random_model_dir("llama", dtype="float32", num_hidden_layers=3, vocab_size=288), model)
    made = steps_recipe(STEPS[case], "dense", calibration={"samples": 8, "length": 16})
    save(byte_level(), model)
    compress(model, tmp_path / "whole", made)
    with pytest.raises(StoppedError):
        compress(model, tmp_path / "out", made, stop=after(2))
    for file in (tmp_path / "out.work").glob("hidden-*.bin"):  # as where it was killed before they were written
        file.unlink()
    compress(model, tmp_path / "out", made)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")
