"""Sparse attention and sparse neurons against transformers' model with loops in their place."""

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface

from llmcompress.errors import RecipeError
from llmcompress.validate.evaluate import lockstep
from llmcompress.validate.load import open_streamed
from llmcompress.validate.omission import omissions_of

IDS = torch.randint(3, 96, (1, 24), generator=torch.Generator().manual_seed(5))


def streamed_logits(path, **asked):
    model = open_streamed(path, dtype=torch.float32)
    [omission] = omissions_of(**asked)
    layers = omission.install(model)
    [[logits]] = [rows(0, IDS.shape[1]) for rows in lockstep([model], [IDS], lambda *_: None)]
    assert layers == set(range(len(model.layers)))
    return logits


@torch.no_grad()
def whole_logits(path, attention="eager", change=lambda model: None):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()
    change(model)
    return model(IDS).logits[0]


def sparse_attention(module, query, key, value, mask, scaling, **_):
    """The largest half of each query's weights, or one, one query after another."""
    out = torch.zeros_like(query)
    share = query.shape[1] // key.shape[1]
    for head in range(query.shape[1]):
        for place in range(query.shape[2]):
            logits = key[0, head // share, : place + 1] @ query[0, head, place] * scaling
            stay = logits.topk(max(1, (place + 1) // 2)).indices
            out[0, head, place] = logits[stay].softmax(0) @ value[0, head // share][stay]
    return out.transpose(1, 2), None


def test_sparse_attention_is_that_of_the_largest_weights(random_model_dir):
    path = random_model_dir("llama", dtype="float32", num_attention_heads=4, num_key_value_heads=2)
    AttentionInterface.register("brute_sparse", sparse_attention)
    wanted = whole_logits(path, "brute_sparse")
    assert (wanted - whole_logits(path)).abs().max() > 1e-3
    torch.testing.assert_close(streamed_logits(path, attention_sparsity="0.5"), wanted, rtol=1e-3, atol=1e-4)


def sparse_neurons(model):
    """Put loops over tokens in place of the blocks: a quarter of the neurons stays."""

    def forward(block, states):
        hidden = functional.silu(block.gate_proj(states)) * block.up_proj(states)
        for token in hidden[0]:
            for neuron in sorted(range(len(token)), key=lambda at, of=token: abs(of[at]))[: -(len(token) // 4)]:
                token[neuron] = 0
        return block.down_proj(hidden)

    for layer in model.model.layers:
        layer.mlp.forward = forward.__get__(layer.mlp)


def test_sparse_neurons_are_those_of_the_largest_magnitude(random_model_dir):
    path = random_model_dir("llama", dtype="float32")
    wanted = whole_logits(path, change=sparse_neurons)
    assert (wanted - whole_logits(path)).abs().max() > 1e-3
    torch.testing.assert_close(streamed_logits(path, mlp_sparsity="0.75"), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "opt", "qwen3_moe", "mixtral"])
def test_every_family_that_is_declared_has_neurons(random_model_dir, family):
    path = random_model_dir(family, dtype="float32")
    dense, sparse = streamed_logits(path, mlp_sparsity="0"), streamed_logits(path, mlp_sparsity="0.5")
    torch.testing.assert_close(dense, whole_logits(path), rtol=1e-3, atol=1e-4)
    assert (sparse - dense).abs().max() > 1e-3


def test_families_without_a_declaration_have_none(random_model_dir):
    model = open_streamed(random_model_dir("bloom"), dtype=torch.float32)
    with pytest.raises(RecipeError, match="knows no feed-forward blocks"):
        omissions_of(mlp_sparsity="0.5")[0].install(model)
