"""Tensors and keys of every further family are those of llama.cpp's converter (scripts/interop/gguf_converter.py)."""

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from ggufmodels import digest, made_values
from llmcompress.errors import CheckpointError, LlmcompressError, PlanError
from llmcompress.formats.gguf.family import known_types
from llmcompress.formats.gguf.metadata import architecture, listed_keys, metadata
from llmcompress.formats.gguf.names import gguf_tensors
from llmcompress.formats.gguf.refused import REASONS
from llmcompress.formats.gguf.tensors import FORMS, convert
from llmcompress.formats.gguf.types import file_type

FOLDER = Path(__file__).parents[3] / "golden"
GOLDEN = json.loads((FOLDER / "gguf_families.json").read_text())
FIRST = json.loads((FOLDER / "gguf_converter.json").read_text())
VOCABULARY = 90
KINDS = {"u32": "UINT32", "i32": "INT32", "u64": "UINT64", "f32": "FLOAT32", "bool": "BOOL", "text": "STRING"}
MORE = {  # what is written although the converter does not: llama.cpp takes the same where it is left out
    "vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base",
    "final_logit_softcapping",  # of Gemma 4 without it, where llama.cpp takes 30
    "feed_forward_length",  # of models whose blocks all hold experts, which read that of an expert
    "attention.recurrent_layers",  # of MiniMax, where llama.cpp takes every eighth layer for one without
    "attention.sliding_window_pattern",  # of Laguna, where llama.cpp takes every fourth layer for one without
    "expert_gating_func",  # published configs say it, those that transformers saves do not
}  # fmt: skip
LEFT_OUT = {  # why a key of the converter is not written, or another value: by the end of its name
    "rope.scaling.type": "'none', which is what llama.cpp takes without a factor",
    "tokenizer.ggml.add_bos_token": "the tokenizer has its own keys",
    "nextn_predict_layers": "0, which is what llama.cpp takes without it",
}
OTHERWISE = {
    ("bloom", "context_length"): "the converter takes the width where published configs say it",
    ("falcon", "context_length"): "the converter says 2048 of all",
    ("granitemoehybrid", "attention.head_count_kv"): "the converter looks for layers of another name",
    ("granitemoehybrid", "context_length"): "the converter says 2^20 of models without positions",
    ("nemotron_h", "context_length"): "the same",
    ("mamba", "ssm.dt_b_c_rms"): "false, which is what llama.cpp takes without it",
    ("ernie4_5_moe", "expert_shared_feed_forward_length"): "the converter guesses; the weights are that wide",
    ("glm", "attention.layer_norm_rms_epsilon"): "the converter looks under a name that transformers does not use",
    ("glm", "context_length"): "the same",
    ("glm4_moe_lite", "leading_dense_block_count"): "the same: mlp_layer_types says it",
    ("nemotron", "attention.layer_norm_rms_epsilon"): "its norms subtract the mean",
}

OTHER_ORDER = {  # of rows, by the end of a tensor's name
    "bamba": ("attn_q.weight", "attn_k.weight"),  # the converter pairs values of whole heads, of which half is rotated
}

NEWER = {
    *(f"blk.{{bid}}.indexer.{role}" for role in ("q_proj", "k_proj", "q_norm")),
    *(f"{mixer}_{role}" for mixer in ("blk.{bid}.hc_attn", "blk.{bid}.hc_ffn", "output_hc")
      for role in ("norm", "down", "up", "inject")),
    *(f"blk.{{bid}}.ple_{role}" for role in ("key", "value", "norm_key", "norm_query", "norm_conv", "conv1d")),
}  # fmt: skip
"""Names of tensors that the package does not know yet, only llama.cpp."""


def tensors_of(kind, source=None, **changes):
    entry = GOLDEN[kind]
    source = entry["source"] if source is None else source
    return gguf_tensors(entry["config"] | changes, list(source.items()), VOCABULARY)


def test_every_model_type_is_compared_with_the_converter():
    first = {entry["config"]["model_type"] for entry in FIRST.values()}
    assert known_types().keys() == first | GOLDEN.keys()


def test_the_documentation_lists_every_model_type_and_their_count():
    text = (FOLDER.parents[1] / "docs" / "gguf.md").read_text()
    section = text.partition("## Families")[2].partition("\n## ")[0]
    listed, refused = section.partition("Refused by name")[::2]
    assert known_types().keys() == set(re.findall(r"`([a-z][a-z0-9_-]*)`", listed))
    assert REASONS.keys() == set(re.findall(r"`([a-z][a-z0-9_-]*)`", refused))
    assert f"{len(known_types())} model types" in section


@pytest.mark.parametrize("kind", GOLDEN)
def test_names_shapes_and_values_are_those_of_the_converter(kind):
    wanted, source = GOLDEN[kind]["tensors"], GOLDEN[kind]["source"]
    made = {tensor.name: tensor for tensor in tensors_of(kind)}
    assert made.keys() == wanted.keys()
    for name, tensor in made.items():
        found = convert(tensor, lambda item: made_values(item, source[item]))
        shape, wanted_digest = wanted[name]
        assert tuple(found.shape) == tensor.shape
        assert [extent for extent in tensor.shape if extent != 1] == [extent for extent in shape if extent != 1]
        if tensor.values is None and not name.endswith(OTHER_ORDER.get(kind, ())):
            assert digest(name, found.numpy()) == wanted_digest, name


@pytest.mark.parametrize("kind", GOLDEN)
def test_keys_are_those_of_the_converter_but_for_named_exceptions(kind):
    config, theirs = GOLDEN[kind]["config"], GOLDEN[kind]["keys"]
    keys = {key.name: key for key in metadata(config, tensors_of(kind), file_type("F32"), "Tiny-Model-7B-v2.0")}
    source = GOLDEN[kind]["source"]
    keys |= {key.name: key for key in listed_keys(config, source, lambda name: made_values(name, source[name]))}
    arch = architecture(config)
    assert theirs["general.architecture"][0] == arch
    for name, (value, type_) in theirs.items():
        short = name.removeprefix(f"{arch}.")
        if name in ("general.architecture", "general.type") or short in LEFT_OUT or (kind, short) in OTHERWISE:
            continue
        key = keys[name]
        found = list(key.value) if isinstance(key.value, tuple) else key.value
        assert np.array_equal(found, value) or np.allclose(np.float32(found), np.float32(value), rtol=1e-6), name
        assert type_.rpartition("/")[2] == KINDS[key.kind.removesuffix("s")], name
    more = {name.removeprefix(f"{arch}.") for name in keys.keys() - theirs.keys() if not name.startswith("general.")}
    assert more <= MORE


@pytest.mark.parametrize("kind", GOLDEN)
def test_every_tensor_is_one_that_the_gguf_package_knows_in_the_architecture(kind):
    family = known_types()[kind]
    number = next(item for item, name in gguf.MODEL_ARCH_NAMES.items() if name == (family.named or family.arch))
    tensors = gguf.TENSOR_NAMES if family.named else gguf.MODEL_TENSORS[number]
    known = {gguf.TENSOR_NAMES[tensor] for tensor in tensors}
    for tensor in tensors_of(kind):
        role = ".".join("{bid}" if part.isdecimal() else part for part in tensor.name.split("."))
        assert {role, role.rpartition(".")[0]} & (known | NEWER), tensor.name


@pytest.mark.parametrize("kind", GOLDEN)
def test_every_missing_tensor_and_every_wrong_shape_is_noticed(kind):
    source = GOLDEN[kind]["source"]
    optional = {f"{role}.bias" for role in known_types()[kind].biases}
    made = {name: tensor.name for tensor in tensors_of(kind) for name in tensor.sources}
    for name, shape in source.items():
        if name not in made:  # a head that is the embedding
            continue
        if made[name].split(".", 2)[-1] not in optional and made[name] != "output.weight":
            with pytest.raises(LlmcompressError):
                tensors_of(kind, {other: extents for other, extents in source.items() if other != name})
        wide = [extent + (place == len(shape) - 1) for place, extent in enumerate(shape)]
        with pytest.raises(LlmcompressError):
            tensors_of(kind, source | {name: wide})


def test_forms_are_undone():
    numbers = torch.linspace(-3, 3, 50)
    for apply, undo in FORMS.values():
        assert torch.allclose(undo(apply(numbers)), numbers, atol=1e-6)


def test_a_family_that_llama_cpp_lacks_is_refused_by_name():
    with pytest.raises(CheckpointError, match=r"'opt'.*llama\.cpp has no such architecture"):
        gguf_tensors({"model_type": "opt"}, [])


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("mellum", {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 9}}},
         "rotates all layers of mellum alike"),
        ("mellum", {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, "mlp_layer_types"),
        ("cohere2_moe", {"shared_expert_combination_strategy": "sum"}, "shared_expert_combination_strategy"),
        ("cohere2_moe", {"layer_types": None}, "sliding_window and layer_types"),
        ("granite_swa", {"layer_rope_theta": [1e4, 1e5, 0.0, 1e4]}, "several bases"),
        ("granitemoe_swa", {"sliding_window": None}, "sliding_window and layer_types"),
        ("laguna", {"num_attention_heads_per_layer": [4, 2]}, "num_attention_heads_per_layer"),
        ("laguna", {"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping"),
        ("deepseek_v32", {"index_head_dim": 32}, "index_head_dim is 32"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "indexer_types"),
        ("mimo_v2_flash", {"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
        ("mimo_v2_flash", {"layer_types": ["full_attention"]}, "sliding_window and layer_types"),
    ],
)  # fmt: skip
def test_what_llama_cpp_would_compute_otherwise_is_refused(kind, changes, says):
    with pytest.raises(PlanError, match=says):
        tensors_of(kind, **changes)


@pytest.mark.parametrize("wrong", [{}, {"model.layers.1.mlp.act_fn.beta": [2]}])
def test_numbers_that_keys_list_must_be_one_in_each_layer(wrong):
    entry = GOLDEN["apertus"]
    source = {name: shape for name, shape in entry["source"].items() if name != "model.layers.1.mlp.act_fn.beta"}
    with pytest.raises(CheckpointError, match=r"act_fn\.beta"):
        listed_keys(entry["config"], source | wrong, lambda name: made_values(name, (source | wrong)[name]))
