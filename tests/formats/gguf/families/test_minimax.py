"""MiniMax's first models: tables that are computed, layers of both kinds, and what llama.cpp computes otherwise."""

import json
from pathlib import Path

import pytest

from llmcompress.errors import LlmcompressError
from llmcompress.formats.gguf.metadata import metadata
from llmcompress.formats.gguf.names import gguf_tensors
from llmcompress.formats.gguf.types import file_type

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "gguf_families.json").read_text())["minimax"]
CONFIG, SOURCE = GOLDEN["config"], GOLDEN["source"]


def tensors(config, source=SOURCE):
    return {tensor.name: tensor.shape for tensor in gguf_tensors(config, list(source.items()))}


def keys(config):
    made = metadata(config, gguf_tensors(config, list(SOURCE.items())), file_type("F32"), "Tiny")
    return {key.name.removeprefix("minimax-01."): key.value for key in made}


def test_layers_of_lightning_attention_are_told_and_have_tensors_of_their_own():
    assert keys(CONFIG)["attention.recurrent_layers"] == (True, False, True, True)
    assert {name.split(".")[1] for name in tensors(CONFIG) if "attn_qkv" in name} == {"0", "2", "3"}


def test_tables_of_decay_are_left_out():
    saved = {f"model.layers.0.self_attn.{name}": [4, 256, 1] for name in ("slope_rate", "query_decay", "key_decay")}
    assert tensors(CONFIG, SOURCE | saved | {"model.layers.0.self_attn.diagonal_decay": [1, 4, 256, 256]}) == tensors(
        CONFIG
    )


def test_heads_are_rotated_as_far_as_the_makers_say():
    assert keys(CONFIG)["rope.dimension_count"] == 8
    assert keys(CONFIG | {"rotary_dim": None})["rope.dimension_count"] == 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mlp_alpha_factor": 1.5}, r"\[1.5, 1.75\], llama.cpp knows one of all"),
        ({"full_attn_alpha_factor": None}, "config.json does not say full_attn_alpha_factor"),
        ({"linear_attn_beta_factor": 0.5}, "linear_attn_beta_factor is 0.5"),
        ({"layer_types": ["linear_attention"]}, "does not tell of 4 layers"),
        ({"layer_types": None}, "has no place"),  # every second layer, others than here
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(changes, words):
    with pytest.raises(LlmcompressError, match=words):
        tensors(CONFIG | changes)
