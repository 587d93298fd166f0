"""What is special in Gemma 3n: matrices stacked outside of layers, a shorter table, and sizes that are built in."""

import json
from pathlib import Path

import pytest
import torch

from llmcompress.errors import CheckpointError, PlanError
from llmcompress.formats.gguf.metadata import metadata
from llmcompress.formats.gguf.names import gguf_tensors
from llmcompress.formats.gguf.tensors import convert
from llmcompress.formats.gguf.types import file_type

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "gguf_families.json").read_text())["gemma3n_text"]
SLIDING, FULL = "sliding_attention", "full_attention"
TABLE = "model.embed_tokens_per_layer.weight"
MORE = {  # than 20 layers, of which those after them take keys and values of earlier ones
    "num_hidden_layers": 25, "num_kv_shared_layers": 5, "layer_types": [*[SLIDING] * 4, FULL] * 5,
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 15, "intermediate_size": [96] * 25,
}  # fmt: skip


def made(source=None, **changes):
    tensors = gguf_tensors(GOLDEN["config"] | changes, list((source or GOLDEN["source"]).items()))
    return {tensor.name: tensor for tensor in tensors}


def longer(*left_out):
    """Names and shapes of 25 layers, the last five without some of their tensors."""
    first = {name: shape for name, shape in GOLDEN["source"].items() if name.startswith("model.layers.0.")}
    more = {name.replace(".0.", f".{layer}.", 1): shape for layer in range(20, 25) for name, shape in first.items()}
    kept = {name: shape for name, shape in more.items() if not name.endswith(left_out)}
    wide = {TABLE: [96, 25 * 256], "model.per_layer_model_projection.weight": [25 * 256, 64]}
    return GOLDEN["source"] | kept | wide


def test_tokens_beyond_a_shorter_table_have_its_first_row_as_in_transformers():
    short = torch.arange(80 * 5120.0).view(80, 5120)
    source = GOLDEN["source"] | {TABLE: list(short.shape)}
    tensor = made(source, vocab_size_per_layer_input=80)["per_layer_token_embd.weight"]
    found = convert(tensor, {TABLE: short}.get)
    assert torch.equal(found[:80], short)
    assert torch.equal(found[80:], short[:1].expand(16, -1))
    with pytest.raises(CheckpointError, match=r"embed_tokens_per_layer.*\[80, 5120\].*\[96, 5120\]"):
        made(source)  # not what the config says


def test_numbered_matrices_must_all_be_there():
    name = "model.altup_projections.1.weight"
    source = {other: shape for other, shape in GOLDEN["source"].items() if other != name}
    with pytest.raises(CheckpointError, match=r"2 matrices are like model\.altup_projections\.0.*speaks of 3"):
        made(source)
    with pytest.raises(CheckpointError, match="of matrices have different shapes"):
        made(GOLDEN["source"] | {name: [64, 32]})


UNSAVED = ("k_proj.weight", "v_proj.weight", "k_norm.weight")  # by transformers, of layers that share keys


def test_layers_that_share_keys_have_their_own_or_zeros_in_their_place():
    whole, short = made(longer(), **MORE), made(longer(*UNSAVED), **MORE)
    assert {name: tensor.shape for name, tensor in short.items()} == {
        name: tensor.shape for name, tensor in whole.items()
    }
    blank = {name for name, tensor in short.items() if tensor.blank}
    assert blank == {f"blk.{layer}.attn_{part}.weight" for layer in range(20, 25) for part in ("k", "v", "k_norm")}
    assert not any(convert(short[name], {}.get).any() for name in blank)
    assert not any(tensor.blank for tensor in whole.values())


def test_other_layers_need_their_keys():
    source = {name: shape for name, shape in longer().items() if name != "model.layers.3.self_attn.k_proj.weight"}
    with pytest.raises(CheckpointError, match=r"no tensor of the checkpoint becomes blk\.3\.attn_k\.weight"):
        made(source, **MORE)


def test_one_width_and_one_share_may_stand_for_all_layers():
    tensors = list(made().values())
    keys = {key.name: key for key in metadata(GOLDEN["config"], tensors, file_type("F32"), "Tiny")}
    other = {key.name: key for key in metadata(
        GOLDEN["config"] | {"intermediate_size": 96, "activation_sparsity_pattern": None}, tensors, file_type("F32"),
        "Tiny",
    )}  # fmt: skip
    assert keys.pop("gemma3n.feed_forward_length").value == (96,) * 20
    assert other.pop("gemma3n.feed_forward_length").value == 96
    assert keys == other


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"laurel_rank": 32}, "laurel_rank is 32, llama.cpp computes gemma3n models with 64"),
        ({"hidden_size_per_layer_input": 128}, "hidden_size_per_layer_input is 128"),
        ({"altup_num_inputs": 2}, "altup_num_inputs is 2"),
        ({"altup_active_idx": 1}, "altup_active_idx is 1"),
        ({"altup_correct_scale": False}, "altup_correct_scale is False"),
        ({"final_logit_softcapping": 20.0}, "final_logit_softcapping is 20.0"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers is 10 of 20 layers"),
        ({"num_kv_shared_layers": "5"}, "num_kv_shared_layers is '5'"),
        ({"layer_types": [FULL]}, "layer_types does not tell of 20 layers"),
        ({**MORE, "layer_types": [FULL, SLIDING] * 12 + [FULL]}, "layer_types of layers 18 and 19 are full"),
        ({"activation_sparsity_pattern": 0.95}, "activation_sparsity_pattern is not"),
        ({"activation_sparsity_pattern": [0.9] * 10 + [0.0] * 10}, "activation_sparsity_pattern is not"),
        ({"intermediate_size": [96] * 19 + [64]}, "intermediate_size has several widths"),
        ({"attention_bias": True}, "attention_bias is True"),
    ],
)
def test_sizes_other_than_those_built_into_llama_cpp_are_refused(changes, says):
    with pytest.raises(PlanError, match=says):
        made(longer() if "num_hidden_layers" in changes else None, **changes)
