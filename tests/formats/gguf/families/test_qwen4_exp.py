"""Qwen4-Exp: the table of n-grams and its keys, and what llama.cpp would compute otherwise."""

import json
from pathlib import Path

import pytest
import torch

from llmcompress.errors import CheckpointError, LlmcompressError
from llmcompress.formats.gguf.metadata import listed_keys, metadata
from llmcompress.formats.gguf.names import gguf_tensors
from llmcompress.formats.gguf.tensors import convert
from llmcompress.formats.gguf.types import file_type

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "gguf_families.json").read_text())["qwen4_exp_text"]
CONFIG, SOURCE = GOLDEN["config"], GOLDEN["source"]
GRAMS = {name: shape for name, shape in SOURCE.items() if ".ple." in name}
NUMBERS = [2**45 + 1, 7, 9]  # float32 does not hold the first


def tensors(config, source=SOURCE):
    return {tensor.name: tensor for tensor in gguf_tensors(config, list(source.items()))}


def keys(config):
    made = metadata(config, list(tensors(config).values()), file_type("F32"), "Tiny")
    return {key.name.removeprefix("qwen4exp."): key.value for key in made}


def test_shards_of_the_table_lie_one_below_the_other_by_number():
    source = dict(reversed(list(SOURCE.items())))
    table = tensors(CONFIG, source)["per_layer_token_embd.weight"]
    found = convert(table, lambda name: torch.full((60, 16), float(name.split("shard_")[1][0])))
    assert torch.equal(found, torch.arange(4.0).repeat_interleave(60)[:, None].expand(240, 16))


def test_models_without_n_grams_have_neither_their_tensors_nor_their_keys():
    config = CONFIG | {"ple_layer_ids": []}
    source = {name: shape for name, shape in SOURCE.items() if name not in GRAMS}
    assert not [name for name in tensors(config, source) if "ple" in name or "per_layer" in name]
    made = metadata(config, list(tensors(config, source).values()), file_type("F32"), "Tiny")
    assert not [key.name for key in made if "ple" in key.name or "per_layer" in key.name]
    assert listed_keys(config, source, lambda name: pytest.fail(name)) == []


def test_whole_numbers_of_any_size_are_kept():
    found = listed_keys(CONFIG, SOURCE, lambda name: torch.tensor(NUMBERS))
    assert {key.name for key in found} == {
        f"qwen4exp.ple.{name}" for name in ("layer_multipliers", "head_offsets", "head_vocab_sizes")
    }
    assert all(key.value == tuple(NUMBERS) and key.kind == "u64s" for key in found)


@pytest.mark.parametrize("values", [torch.tensor([1.5, 2.0]), torch.tensor([-1, 2])])
def test_other_numbers_are_refused(values):
    with pytest.raises(CheckpointError, match="layer_multipliers does not hold whole numbers"):
        listed_keys(CONFIG, SOURCE, lambda name: values)


def test_the_first_of_several_tokens_that_end_a_text_ends_n_grams():
    assert keys(CONFIG | {"eos_token_id": [5, 7]})["ple.eos_token_id"] == 5
    assert keys(CONFIG | {"eos_token_id": 0})["ple.eos_token_id"] == 0
    with pytest.raises(CheckpointError, match=r"eos_token_id is .*not a number"):
        keys(CONFIG | {"eos_token_id": []})


def test_layers_are_called_as_published_and_as_transformers_saves_them():
    saved = CONFIG | {"layer_types": ["linear_attention"] * 3 + ["indexed_attention"]}
    assert keys(saved) == keys(CONFIG)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ple_layer_ids": [2, 3]}, "one layer that reads n-grams"),
        ({"ple_embed_dim": 32}, "ple_embed_dim is 32"),
        ({"heads_per_ngram": 40}, "80 heads of n-grams of 3 tokens"),
        ({"ngram_size": 9}, "16 heads of n-grams of 9 tokens"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, r"mrope_section \[11, 11, 10\]"),
        ({"linear_value_head_dim": 32}, "linear_value_head_dim is not"),
        ({"output_gate_type": None}, "output_gate_type is None"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"layer_types": ["linear_attention"]}, "does not tell of 4 layers"),
        ({"ngram_vocab_size_base": 60}, "ngram_embedding.* becomes|ngram_embedding.* config.json speaks of"),
        ({"ple_layer_ids": []}, "ngram_embedding.* config.json speaks of 0"),
        ({"indexer_n_heads": 3}, "index_qk_proj"),
        ({"hc_count": 4}, "hc_norm"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(changes, words):
    with pytest.raises(LlmcompressError, match=words):
        tensors(CONFIG | changes)
