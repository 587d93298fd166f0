"""Models are run on zeros before a tensor is read: what cannot be run is refused, with the way out."""

import pytest
import torch

from llmcompress import arch
from llmcompress.errors import CheckpointError
from llmcompress.model.rehearsal import rehearse
from llmcompress.model.skeleton import load_config
from llmcompress.store.checkpoint import Checkpoint
from streaming import observed


def rehearsed(path, **options):
    config, headers = load_config(path), Checkpoint(path).headers
    shapes = {name: stored.spec.shape for name, stored in headers.tensors.items()}
    rehearse(shapes, config, arch.find(config.model_type) or observed(path), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_runs_in_every_type(dtype, random_model_dir):
    rehearsed(random_model_dir("llama"), dtype=dtype)


def test_layers_that_run_in_float32_alone_are_refused_with_the_way_out(random_model_dir):
    """Without a cache, xLSTM multiplies states in float32 by values in the model's type once a chunk is whole."""
    path = random_model_dir("xlstm", num_heads=4)
    rehearsed(path)
    with pytest.raises(CheckpointError, match="in bfloat16, a 'xlstm' model of this config cannot be run") as found:
        rehearsed(path, dtype=torch.bfloat16)
    assert found.value.hint == "use --compute-dtype float32"


def test_what_is_wrong_in_every_type_is_said_of_none(random_model_dir):
    path = random_model_dir("llama")
    config, headers = load_config(path), Checkpoint(path).headers
    shapes = {name: stored.spec.shape for name, stored in headers.tensors.items()}
    del shapes["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"^(?!in bfloat16).*up_proj"):
        rehearse(shapes, config, arch.find("llama"), dtype=torch.bfloat16)
