"""Architectures found by running: what is seen of declared ones is what they declare, and unknown ones work."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from llmcompress import arch
from llmcompress.errors import CheckpointError
from llmcompress.model.observe import _named, _outline, _Seen, _TopK, observe
from llmcompress.model.skeleton import load_config, skeleton
from llmcompress.registry import discover
from llmcompress.store.checkpoint import Checkpoint
from streaming import ids, observed, reference_logits, streamed, streamed_logits

MODEL_TYPES = [model_type for spec in discover(arch, "ARCH").values() for model_type in spec.model_types]
SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2}

UNKNOWN = [
    ("starcoder2", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    ("bloom", {"n_head": 4}),  # layers return tuples; ALiBi depends on the size of the batch
    ("falcon", {"num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2}),
    ("stablelm", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    ("qwen2_moe", {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}),
]  # fmt: skip


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_is_declared_is_what_is_observed(model_type, random_model_dir):
    spec = arch.find(model_type)
    seen = observed(random_model_dir(model_type))

    def shape(stages):
        return [[(linear.path, linear.conv1d) for linear in stage] for stage in stages]

    assert seen.observed
    assert (seen.layers, seen.embed, seen.head) == (spec.layers, spec.embed, spec.head)
    dense = [f"mlp.{part}_proj" for part in ("gate", "up", "down")] if model_type == "qwen3_moe" else []
    ran = [linear for linear in spec.linears if linear.path not in dense]
    assert shape(seen.stages()) == shape(replace(spec, linears=tuple(ran)).stages())
    assert not seen.left_out
    assert {path: name for path, name in seen.disk.items() if path.endswith("_proj")} == {
        path: name for path, name in spec.disk.items() if path.endswith("_proj")
    }


def test_a_dense_layer_among_experts_is_observed_too(random_model_dir):
    seen = observed(random_model_dir("qwen3_moe", mlp_only_layers=[0]))
    assert {linear.path for linear in seen.linears} == {linear.path for linear in arch.find("qwen3_moe").linears}


@pytest.mark.parametrize("case", UNKNOWN, ids=lambda case: case[0])
def test_an_unknown_type_runs_section_by_section(case, random_model_dir):
    model_type, overrides = case
    path = random_model_dir(model_type, **overrides)
    assert arch.find(model_type) is None
    truth = reference_logits(path, ids())
    torch.testing.assert_close(
        streamed_logits(streamed(path), ids()), truth, rtol=1e-5, atol=1e-5 * float(truth.abs().max())
    )


def test_parallel_branches_that_read_one_input_share_it(random_model_dir):
    seen = observed(random_model_dir("falcon", **dict(UNKNOWN)["falcon"]))
    assert [[linear.path for linear in stage] for stage in seen.stages()] == [
        ["self_attention.query_key_value", "mlp.dense_h_to_4h"],
        ["self_attention.dense"],
        ["mlp.dense_4h_to_h"],
    ]


def test_routers_and_gates_of_an_unknown_type_are_left_out(random_model_dir):
    seen = observed(random_model_dir("qwen2_moe", **dict(UNKNOWN)["qwen2_moe"]))
    assert [linear.path for linear in seen.never] == ["mlp.shared_expert_gate"]
    assert set(seen.left_out) == {"mlp.shared_expert_gate"}
    assert sorted(linear.path for linear in seen.linears)[:6] == sorted(
        f"mlp.{path}.{name}_proj" for path in ("shared_expert", "experts.{e}") for name in ("gate", "up", "down")
    )


def test_layers_that_are_built_alike_and_run_different_matrices_are_told_apart(random_model_dir):
    """Both hybrid layers hold an adapter for each of them and run their own."""
    kinds = ["linear_attention", "hybrid"] * 2
    config = {"layers_block_type": kinds, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    config |= {"attention_hidden_size": 128, "attention_head_dim": 32, "n_mamba_heads": 8, "mamba_headdim": 16}
    seen = observed(random_model_dir("zamba2", adapter_rank=8, **config))
    adapters = "shared_transformer.feed_forward.gate_up_proj_adapter_list.{}.{}"
    assert seen.idle == {
        1: {adapters.format(1, 0), adapters.format(1, 1)},
        3: {adapters.format(0, 0), adapters.format(0, 1)},
    }
    assert seen.idle[1] | seen.idle[3] < {linear.path for linear in seen.linears}
    assert all("did not run" in seen.left_out[path] for path in seen.idle[1])


def test_experts_that_are_taken_apart_take_no_memory(random_model_dir):
    path = random_model_dir("qwen2_moe", **dict(UNKNOWN)["qwen2_moe"])
    model = skeleton(load_config(path), None)
    spec, _ = _named(model, _outline(model, "qwen2_moe"), Checkpoint(path).names())
    assert spec.experts.number == 4
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_router_is_known_by_its_width_or_by_the_top_k_after_it():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.route, self.up, self.down = nn.Linear(8, 5), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            chosen = self.route(x).softmax(-1).topk(2).values.sum(-1, keepdim=True)
            return x + chosen * self.down(self.up(x))

    layer = Block()
    seen = _Seen(layer, None)
    for path, module in seen.matrices.items():
        module.register_forward_pre_hook(seen.hook(path, module))
    with _TopK(seen.ranked):
        layer(torch.zeros(1, 7, 8))
    assert seen.ranked == {5}
    assert seen.widths == {"route": 5, "up": 16, "down": 8}
    assert seen.inputs["route"] == seen.inputs["up"] != seen.inputs["down"]


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("hrm_text", "two stacks of layers, model.L_module.layers and model.H_module.layers"),
        ("rwkv", "cannot be run without its layers"),  # layers return three things
        ("vit", "cannot build a 'vit' model for text"),
    ],
)
def test_what_cannot_be_observed_is_refused(model_type, words):
    config = AutoConfig.for_model(model_type, hidden_size=192, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=words):
        observe(config, ())


def test_a_model_without_layers_is_refused(random_model_dir):
    config = load_config(random_model_dir("starcoder2", **dict(UNKNOWN)["starcoder2"]))
    config.num_hidden_layers = 0
    with pytest.raises(CheckpointError, match="no decoder layers were found in a 'starcoder2' model"):
        observe(config, ())
