"""Names on disk of parameters are those under which transformers finds them, as its own loading shows."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmcompress.errors import CheckpointError
from llmcompress.model.disk_names import disk_names
from llmcompress.model.experts import layout_of
from llmcompress.model.skeleton import load_config, skeleton
from llmcompress.store.checkpoint import Checkpoint
from streaming import observed, streamed

SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2}
MOE = {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TYPES = {
    "minimax_m2": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    "phimoe": {**SMALL, "num_local_experts": 4},
    "lfm2_moe": {**MOE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "exaone_moe": {**MOE, "num_shared_experts": 1, "layer_types": ["full_attention"] * 2, "n_group": 1, "topk_group": 1,
                   "mlp_layer_types": ["dense", "sparse"], "head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("model_type", TYPES)
@torch.no_grad()
def test_every_parameter_is_read_from_where_transformers_reads_it(model_type, random_model_dir):
    path = random_model_dir(model_type, **TYPES[model_type])
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = streamed(path)
    experts = model.spec.experts.paths[0]
    for number, layer in enumerate(theirs.model.layers):
        with model.layer(number) as mine:
            held = dict(mine.named_parameters()) | dict(mine.named_buffers())
            for name, value in (*layer.named_parameters(), *layer.named_buffers()):
                if name == f"{experts}.gate_up_proj":
                    for expert, (gate, up) in enumerate(value.chunk(2, 1) for value in value[:, None]):
                        assert torch.equal(held[f"{experts}.{expert}.gate_proj.weight"], gate[0])
                        assert torch.equal(held[f"{experts}.{expert}.up_proj.weight"], up[0])
                elif name == f"{experts}.down_proj":
                    for expert, down in enumerate(value):
                        assert torch.equal(held[f"{experts}.{expert}.down_proj.weight"], down)
                else:
                    assert torch.equal(held[name], value), name


def test_names_of_experts_are_those_on_disk(random_model_dir):
    path = random_model_dir("minimax_m2", **TYPES["minimax_m2"])
    spec = observed(path)
    written = {
        f"model.layers.1.{spec.disk_path(f'mlp.experts.{e}.{part}_proj')}.weight"
        for e in range(4)
        for part in ("gate", "up", "down")
    }
    assert written == {name for name in Checkpoint(path).names() if re.match(r"model\.layers\.1\..*experts\.", name)}


def asked(path, change):
    """What is found for the names of a checkpoint after `change`, one name at a time."""
    model = skeleton(load_config(path), None)
    block = model.model.layers[1].mlp.experts
    names = [change(name) for name in Checkpoint(path).names()]
    return disk_names(model, "model.layers", names, {"mlp.experts": layout_of(block)})


def test_names_without_the_base_models_prefix_and_unknown_ones_need_no_saying(random_model_dir):
    path = random_model_dir("qwen2_moe", **MOE)
    found = asked(path, lambda name: name.removeprefix("model."))
    assert (found.disk, found.joined, found.separate) == ({}, {}, True)
    assert not asked(path, lambda name: name.replace("experts.", "others.")).separate


def test_experts_that_do_not_count_from_zero_are_not_taken_apart(random_model_dir):
    path = random_model_dir("qwen2_moe", **MOE)
    shifted = asked(path, lambda name: re.sub(r"(experts\.)(\d)", lambda m: f"{m[1]}{int(m[2]) + 5}", name))
    assert not shifted.separate


def test_layers_that_call_one_parameter_differently_are_refused(random_model_dir):
    path = random_model_dir("phimoe", **TYPES["phimoe"])
    with pytest.raises(CheckpointError, match="in one layer"):
        asked(path, lambda name: name.replace("layers.1.block_sparse_moe", "layers.1.mlp"))
