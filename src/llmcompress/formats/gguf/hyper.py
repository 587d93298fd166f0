"""The hyperparameters of a checkpoint by its config.json, under one name each, whatever its family calls them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcompress.errors import CheckpointError

_HINT = "give a directory as transformers saves it"


@dataclass(frozen=True)
class Hyper:
    """Sizes of a model. inner: width of the feed-forward block, expert_inner: of one expert; experts: 0 if dense.

    epsilon: of the norms. config: config.json with what it leaves out filled in.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    heads_kv: int
    head_dim: int
    context: int
    vocabulary: int
    experts: int
    experts_used: int
    expert_inner: int
    epsilon: float
    config: Mapping[str, Any]


def read_hyper(config: Mapping[str, Any], defaults: Mapping[str, Any], experts: bool, grouped: bool) -> Hyper:
    """Hyperparameters of a config.json; CheckpointError names the one that is missing or no number.

    defaults: values of keys that the config leaves out. experts: whether the family has them. grouped: whether it may
    have fewer heads of keys and values than of queries.
    """
    config = {**defaults, **config}
    hidden = whole(config, "hidden_size", "n_embd")
    heads = whole(config, "num_attention_heads", "n_head")
    inner = 4 * hidden if "n_embd" in config and config.get("n_inner") is None else None
    inner = inner or whole(config, "intermediate_size", "n_inner")
    stated = config.get("head_dim") is not None
    if not stated and hidden % heads:
        raise CheckpointError(f"config.json: {heads} heads do not divide the width {hidden}", _HINT)
    of_expert = config.get("moe_intermediate_size") is not None
    return Hyper(
        layers=whole(config, "num_hidden_layers", "n_layer"),
        hidden=hidden,
        inner=inner,
        heads=heads,
        heads_kv=whole(config, "num_key_value_heads", "num_attention_heads") if grouped else heads,
        head_dim=whole(config, "head_dim") if stated else hidden // heads,
        context=whole(config, "max_position_embeddings", "n_positions", "n_ctx"),
        vocabulary=whole(config, "vocab_size"),
        experts=whole(config, "num_local_experts", "num_experts") if experts else 0,
        experts_used=whole(config, "num_experts_per_tok") if experts else 0,
        expert_inner=whole(config, "moe_intermediate_size") if of_expert else inner,
        epsilon=number(config, "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
        config=config,
    )


def whole(config: Mapping[str, Any], *keys: str) -> int:
    """The first of `keys` that the config has, a whole number from 1 to 2^31 - 1; CheckpointError if it is none."""
    key, value = _first(config, keys)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise CheckpointError(f"config.json: {key} is {value!r}, not a whole number above 0", _HINT)
    return value


def number(config: Mapping[str, Any], *keys: str) -> float:
    """The first of `keys` that the config has, a finite number; CheckpointError if it is none."""
    key, value = _first(config, keys)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 3e38:
        raise CheckpointError(f"config.json: {key} is {value!r}, not a number", _HINT)
    return float(value)


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, Any]:
    for key in keys:
        if config.get(key) is not None:
            return key, config[key]
    raise CheckpointError(f"config.json does not say {keys[0]}", _HINT)
