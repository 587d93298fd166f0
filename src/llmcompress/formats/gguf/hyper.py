"""The hyperparameters of a checkpoint by its config.json, under one name each, whatever its family calls them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcompress.arch.spec import LAYER_COUNTS
from llmcompress.errors import CheckpointError

_HINT = "give a directory as transformers saves it"
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon")


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


def read_hyper(
    config: Mapping[str, Any], defaults: Mapping[str, Any], experts: bool, grouped: bool, attention: bool
) -> Hyper:
    """Hyperparameters of a config.json; CheckpointError names the one that is missing or no number.

    defaults: values of keys that the config leaves out. experts: whether the family has them. grouped: whether it may
    have fewer heads of keys and values than of queries. attention: whether it has layers of attention.
    """
    config = {**defaults, **config}
    hidden = whole(config, *_HIDDEN)
    heads = whole(config, *_HEADS) if attention else 0
    stated = config.get("head_dim") is not None
    if heads and not stated and hidden % heads:
        raise CheckpointError(f"config.json: {heads} heads do not divide the width {hidden}", _HINT)
    inner = _inner(config, hidden) if attention else 0
    experts = experts and any(config.get(name) is not None for name in _EXPERTS)
    of_expert = config.get("moe_intermediate_size") is not None
    return Hyper(
        layers=_layers(config),
        hidden=hidden,
        inner=inner,
        heads=heads,
        heads_kv=whole(config, "num_key_value_heads", "num_kv_heads", *_HEADS) if heads and grouped else heads,
        head_dim=whole(config, "head_dim") if stated else hidden // max(1, heads),
        context=whole(config, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
        vocabulary=whole(config, "vocab_size"),
        experts=whole(config, *_EXPERTS) if experts else 0,
        experts_used=whole(config, *EXPERTS_USED) if experts else 0,
        expert_inner=whole(config, "moe_intermediate_size") if of_expert else inner,
        epsilon=number(config, *_EPSILONS),
        config=config,
    )


def _layers(config: Mapping[str, Any]) -> int:
    """The number of layers, which some configs say by the list of their kinds alone."""
    kinds = config.get("layers_block_type")
    if isinstance(kinds, list) and kinds and all(config.get(name) is None for name in LAYER_COUNTS):
        return len(kinds)
    return whole(config, *LAYER_COUNTS)


def _inner(config: Mapping[str, Any], hidden: int) -> int:
    """Width of the feed-forward block: four times that of the model in old families that do not say it."""
    names = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "moe_intermediate_size")
    old = any(name in config for name in ("n_embd", "n_layer", "n_layers"))
    if old and all(config.get(name) is None for name in names):
        return 4 * hidden
    return whole(config, *names)


def whole(config: Mapping[str, Any], *keys: str) -> int:
    """The first of `keys` that the config has, a whole number from 1 to 2^31 - 1; CheckpointError if it is none."""
    key, value = _first(config, keys)
    if isinstance(value, list) and len(set(map(str, value))) == 1:  # of every layer the same
        value = value[0]
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
