"""Kimi Linear as it was published, as transformers saves it, and what llama.cpp would compute otherwise."""

import json
from pathlib import Path

import pytest

from llmcompress.errors import PlanError
from llmcompress.formats.gguf.metadata import metadata
from llmcompress.formats.gguf.names import gguf_tensors
from llmcompress.formats.gguf.types import file_type

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "gguf_families.json").read_text())["kimi_linear"]
CONFIG, SOURCE = GOLDEN["config"], GOLDEN["source"]


def tensors(config, source=SOURCE):
    return {tensor.name: tensor.shape for tensor in gguf_tensors(config, list(source.items()))}


def keys(config):
    return metadata(config, gguf_tensors(config, list(SOURCE.items())), file_type("F32"), "Tiny")


def test_a_published_config_says_the_same_in_a_part_of_its_own():
    saved = {"layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"}
    published = {key: value for key, value in CONFIG.items() if key not in saved}
    assert tensors(published) == tensors(CONFIG)
    assert keys(published) == keys(CONFIG)


def test_dense_blocks_have_the_name_of_sparse_ones_where_transformers_saved_them():
    saved = {name.replace(".mlp.", ".block_sparse_moe."): shape for name, shape in SOURCE.items()}
    assert saved.keys() != SOURCE.keys()
    assert tensors(CONFIG, saved) == tensors(CONFIG)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_lora_rank": 24}, "q_lora_rank is 24"),
        ({"linear_attn_config": {"num_heads": 8}, "linear_num_heads": 8}, "linear_num_heads is 8"),
        ({"moe_renormalize": False}, "moe_renormalize is False"),
        ({"num_expert_group": 2}, "num_expert_group is 2"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"layer_types": None, "linear_attn_config": "unknown"}, "does not tell of 4 layers"),
        ({"layer_types": ["full_attention"]}, "does not tell of 4 layers"),
        ({"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, "a dense layer after one with experts"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(changes, words):
    with pytest.raises(PlanError, match=words):
        tensors(CONFIG | changes)
