"""Checks of a draft head: what its ids say agrees, and every shape is the one that config.json asks for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmcompress.validate.findings import Check, guarded, summary
from llmcompress.validate.published import file_sha256
from llmcompress.validate.stored import Tensor

EAGLE, MEDUSA = DRAFTS = "eagle3", "medusa"
_STATES = 3  # hidden states of the target that `fc` reads


def draft_form(config: Mapping[str, Any]) -> str | None:
    """The kind of head that config.json is of; None for a model."""
    return config.get("speculators_model_type") or (MEDUSA if config.get("model_type") == MEDUSA else None)


def draft_checks(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], report: Mapping[str, Any], source: Path | None
) -> list[Check]:
    """Checks of shapes and ids; with `source`, whether that is the model that the head was made for."""
    checks = [
        guarded("config", lambda: summary("config", _shape_wrongs(config, tensors), "sizes and tensors agree")),
        guarded("ids", lambda: _ids(config, tensors)),
    ]
    if source is not None:
        checks.append(guarded("source", lambda: _of_source(report, source)))
    return checks


def _shape_wrongs(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """Tensors that are missing, too many, or of another shape."""
    wanted = _medusa_shapes(config) if draft_form(config) == MEDUSA else _eagle_shapes(config)
    wrong = [f"{name} is missing" for name in wanted.keys() - tensors.keys()]
    wrong += [f"{name} has no place in a head" for name in tensors.keys() - wanted.keys()]
    wrong += [
        f"{name} is {list(tensors[name].shape)}, config.json asks for {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    return sorted(wrong)


def _eagle_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of an EAGLE-3 head."""
    layer = config["transformer_layer_config"]
    hidden, inner, width = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    queries, keys = layer["num_attention_heads"] * width, layer["num_key_value_heads"] * width
    below = {
        **dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), (hidden,)),
        "self_attn.q_proj": (queries, 2 * hidden),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (keys, 2 * hidden)),
        "self_attn.o_proj": (hidden, queries),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden)),
        "mlp.down_proj": (hidden, inner),
    }
    return {
        "fc.weight": (hidden, _STATES * hidden),
        **{f"layers.0.{name}.weight": shape for name, shape in below.items()},
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
        "d2t": (config["draft_vocab_size"],),
        "t2d": (layer["vocab_size"],),
    }


def _medusa_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of heads of Medusa that share one matrix of logits."""
    hidden, able = config["hidden_size"], config["truncated_vocab_size"]
    blocks = [(block, layer) for block in range(config["num_heads"]) for layer in range(config["num_hidden_layers"])]
    ids = {"token_map": (able,)} if able < config["vocab_size"] else {}
    layers = {f"blocks.{block}.layers.{layer}.weight": (hidden, hidden) for block, layer in blocks}
    return {**layers, "lm_head.weight": (able, hidden), **ids}


def _ids(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Check:
    """Whether the tokens that can be drafted are some of the target's, each once."""
    if draft_form(config) == MEDUSA:
        vocabulary, name = config["vocab_size"], "token_map"
        ids = tensors[name].array() if name in tensors else np.arange(config["truncated_vocab_size"])
    else:
        vocabulary, name = config["transformer_layer_config"]["vocab_size"], "d2t"
        ids = np.arange(config["draft_vocab_size"]) + tensors[name].array()
    wrong = [f"{name} leads to token {token}, of {vocabulary}" for token in ids[(ids < 0) | (ids >= vocabulary)]]
    if not wrong and len(np.unique(ids)) < len(ids):
        wrong.append(f"{name} names a token twice")
    if not wrong and name == "d2t" and not np.array_equal(np.sort(ids), np.flatnonzero(tensors["t2d"].array())):
        wrong.append("d2t and t2d name other tokens")
    return summary("ids", wrong, f"{len(ids)} of {vocabulary} tokens can be drafted")


def _of_source(report: Mapping[str, Any], source: Path) -> Check:
    """Whether `source` has the files that the report names."""
    said = {**report["source"]["files_sha256"], "config.json": report["source"]["config_sha256"]}
    wrong = [f"{name} of {source} is missing" for name in said if not (source / name).is_file()]
    wrong = wrong or [
        f"{name} of {source} is not what the head was made for"
        for name, recorded in said.items()
        if file_sha256(source / name) != recorded
    ]
    return summary("source", wrong, "it was made for this model")
