"""Checks that config.json and the weights belong to one model, as far as headers tell.

Without these checks a misfit would be noticed after hours, when the layer is loaded, or never, where no layer is run.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from math import inf, isfinite
from typing import Any

from llmcompress.arch import find
from llmcompress.arch.spec import LAYER_COUNTS, ArchSpec, attention_heads
from llmcompress.engine.source.tensor_names import MatrixRef
from llmcompress.errors import CheckpointError, PlanError
from llmcompress.store.headers import ModelHeaders, Stored

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "vocab_size", "word_embed_proj_dim")
# may differ from layer to layer in families that are not declared, and are lists then
PER_LAYER = ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner", "head_dim", "num_attention_heads",
         "n_head", "num_key_value_heads")  # fmt: skip
_POSITIONS = ("max_position_embeddings", "n_positions")
# of what these are called, a norm or a rotation divides by them or takes a power of them
_POSITIVE = ("*eps", "*epsilon", "*theta", "rotary_emb_base", "rotary_pct", "partial_rotary_factor", "factor",
             "low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "attention_factor",
             "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier",
             "logits_scaling")  # fmt: skip
_OR_ZERO = ("layer_rope_theta",)  # of a layer that is not rotated
_UNBOUNDED = ("time_step_limit",)  # of state space models, infinite as they are published
_WORDS = ("NaN", "Infinity", "-Infinity")
_MOST_NUMBERS = 50_000  # transformers takes minutes over lists of millions
_HINT = "the config does not fit the weights"


def check_numbers(headers: ModelHeaders) -> None:
    """CheckpointError unless counts and sizes in config.json are numbers that the weights can have.

    Later code builds loops and tables of these numbers: after this check no config makes them endless.
    """
    if next(islice(_numbers("", headers.config), _MOST_NUMBERS, None), None) is not None:
        raise CheckpointError(f"{headers.path / 'config.json'} holds more than {_MOST_NUMBERS:,} numbers", _HINT)
    tensors = [stored.spec for stored in headers.tensors.values()]
    widest = max((max(spec.shape, default=1) for spec in tensors), default=1)
    limits = dict.fromkeys((*LAYER_COUNTS, *_EXPERTS), len(tensors)) | dict.fromkeys(
        (*_WIDTHS, *PER_LAYER), 16 * widest
    )
    limits |= dict.fromkeys(_POSITIONS, 1 << 31)
    declared = find(str(headers.config.get("model_type"))) is not None
    text = headers.config.get("text_config")
    for config in (headers.config, text if isinstance(text, Mapping) else {}):
        for key, limit in limits.items():
            value = config.get(key)
            many = value if isinstance(value, list) and key in (*_EXPERTS, *PER_LAYER) and not declared else [value]
            for item in many:
                whole = isinstance(item, int) and not isinstance(item, bool)
                if item is not None and not (whole and (0 if key in _EXPERTS else 1) <= item <= limit):
                    raise CheckpointError(
                        f"{headers.path / 'config.json'}: {key} is {item!r}, which these weights cannot have", _HINT
                    )


def check_hyperparameters(headers: ModelHeaders) -> None:
    """CheckpointError for numbers in config.json that are not finite, or that a norm or rotation cannot have.

    With either, text that runs through the model becomes no numbers, and nothing could be measured.
    """
    for key, value in _numbers("", headers.config):
        positive = any(fnmatchcase(key, pattern) for pattern in _POSITIVE)
        if value == 0 and key in _OR_ZERO:
            continue
        if key not in _UNBOUNDED and not (0 < value < inf if positive else isfinite(value)):
            raise CheckpointError(
                f"{headers.path / 'config.json'}: {key} is {value}, with which no text can run", "fetch the file again"
            )


def check_length(headers: ModelHeaders, length: int) -> None:
    """PlanError for windows of `length` tokens that are longer than the model's positions."""
    limit = next((headers.config[key] for key in _POSITIONS if headers.config.get(key)), None)
    if isinstance(limit, int) and length > limit:
        raise PlanError(
            f"windows of {length} tokens are longer than the model's {limit} positions", f"use --length {limit}"
        )


def _numbers(key: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers of a config, each with the key that it, or the list around it, stands under."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _numbers(key if name == "__float__" else name, item)  # as transformers writes infinities
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(key, item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value
    elif value in _WORDS:
        yield key, float(value)


def check_names(headers: ModelHeaders, spec: ArchSpec, prefix: str, count: int) -> None:
    """CheckpointError unless all layers of a declared family hold the same tensors, and no tensor outside is missing.

    prefix: on-disk name of the list of layers; count: number of layers. In a mixture of experts, dense and sparse
    blocks may alternate.
    """
    text = headers.config.get("text_config")
    configs = (headers.config, text if isinstance(text, Mapping) else {})
    stated = [config[key] for config in configs for key in LAYER_COUNTS if config.get(key) is not None]
    if stated and count not in (stated if spec.observed else stated[:1]):
        raise CheckpointError(
            f"{headers.path / 'config.json'} speaks of {stated[0]} layers, {headers.place} holds {count}", _HINT
        )
    if spec.observed:
        return
    _check_layers_alike(headers, spec, prefix, count)
    _check_outside(headers, spec)


def _check_layers_alike(headers: ModelHeaders, spec: ArchSpec, prefix: str, count: int) -> None:
    """CheckpointError unless all layers hold tensors of the same names and shapes, but for those of experts."""
    held: dict[int, dict[str, Stored]] = {number: {} for number in range(count)}
    for number, name, stored in _below(headers, prefix):
        if number < count and (spec.experts is None or not name.startswith(("mlp.", "block_sparse_moe."))):
            held[number][name] = stored
    for number, names in held.items():
        for name in (*sorted(held[0].keys() - names.keys()), *sorted(names.keys() - held[0].keys())):
            without, other = (number, 0) if name in held[0] else (0, number)
            raise CheckpointError(
                f"{headers.place} has no tensor {prefix}.{without}.{name}, but one of that name in layer {other}",
                "fetch the file again",
            )
        for name, stored in names.items():
            if stored.spec.shape != held[0][name].spec.shape:
                raise CheckpointError(
                    f"{headers.place}: tensor {stored.spec.name} is {list(stored.spec.shape)}, "
                    f"in layer 0 {list(held[0][name].spec.shape)}",
                    "fetch the file again",
                )


def _check_outside(headers: ModelHeaders, spec: ArchSpec) -> None:
    """CheckpointError unless the embedding, the head and whatever else stands outside of the layers is there."""
    tied = headers.config.get("tie_word_embeddings") is not False
    head, embedding = _outside(headers, spec, spec.head), _outside(headers, spec, spec.embed)
    lacking = [module for module in spec.outside if _outside(headers, spec, module) is None]
    lacking += [spec.embed] if embedding is None and head is None else []  # a tied one may be stored as the head
    lacking += [spec.head] if head is None and not tied else []
    for module in lacking:
        raise CheckpointError(f"{headers.place} has no tensor {spec.disk_path(module)}.weight", "fetch the file again")


def check_shapes(headers: ModelHeaders, spec: ArchSpec, matrices: Sequence[MatrixRef]) -> None:
    """CheckpointError unless the shapes of a declared family are those that config.json gives."""
    if spec.observed:
        return
    config = headers.config
    hidden = _first(config, "hidden_size", "n_embd")
    inner = _first(config, "ffn_dim", "n_inner", "intermediate_size")
    if inner is None and hidden is not None and "n_inner" in config:
        inner = 4 * hidden
    experts = _first(config, "moe_intermediate_size") or inner
    reads = {"attn_in": hidden, "mlp_in": hidden, "expert_in": hidden, "mlp_hidden": inner, "expert_hidden": experts}
    writes = {"attn_out": hidden, "mlp_hidden": hidden, "expert_hidden": hidden}
    for ref in matrices:
        stored = headers.tensors[f"{ref.module}.weight"]
        rows, columns = reversed(stored.spec.shape) if ref.linear.conv1d else stored.spec.shape
        kind = ref.space.partition(".")[0]
        _same(headers, stored, "inputs", columns, reads.get(kind))
        _same(headers, stored, "outputs", rows, writes.get(kind))
        if spec.grouped_queries:
            _same(headers, stored, "outputs", rows, _projected(config, ref.path.rpartition(".")[2]))
        bias = headers.tensors.get(f"{ref.module}.bias")
        if bias is not None and bias.spec.shape != (rows,):
            raise CheckpointError(
                f"{bias.file}: tensor {bias.spec.name} is {list(bias.spec.shape)}, its matrix has {rows} outputs", _HINT
            )
    vocabulary, embedded = _first(config, "vocab_size"), _first(config, "word_embed_proj_dim") or hidden
    for module in (spec.embed, spec.head):
        table = _outside(headers, spec, module)
        if table is not None and len(table.spec.shape) == 2:
            _same(headers, table, "rows", table.spec.shape[0], vocabulary)
            _same(headers, table, "columns", table.spec.shape[1], embedded)


def likely_vocabulary(headers: ModelHeaders) -> int:
    """The size of the vocabulary for an estimate: by config.json, or else the rows of the largest tensor."""
    said = headers.config.get("vocab_size")
    largest = max((stored.spec for stored in headers.tensors.values()), key=lambda spec: spec.nbytes)
    return said if isinstance(said, int) else largest.shape[0]


def vocabulary_size(headers: ModelHeaders) -> int:
    """The number of tokens in the vocabulary, by config.json; CheckpointError where config.json does not say it."""
    text = headers.config.get("text_config")
    for config in (headers.config, text if isinstance(text, Mapping) else {}):
        size = config.get("vocab_size")
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    raise CheckpointError(
        f"{headers.path / 'config.json'} does not say how many tokens there are (vocab_size)",
        "give a directory as transformers saves it",
    )


def hidden_width(headers: ModelHeaders) -> int:
    """Width of hidden states, by config.json; 0 if it is not there."""
    config: Any = headers.config
    return int(config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 0)


def cached_width(headers: ModelHeaders) -> int:
    """Numbers of the key and the value that a layer keeps of a token, for an estimate."""
    queries, pairs = attention_heads(headers.config) or (1, 1)
    return 2 * pairs * (_first(headers.config, "head_dim") or hidden_width(headers) // queries)


def numbered(prefix: str) -> re.Pattern[str]:
    """Matches the beginning of the name of a tensor in a layer; the group is the layer's number."""
    return re.compile(rf"{re.escape(prefix)}\.([0-9]{{1,9}})\.")


def _first(config: Mapping[str, Any], *keys: str) -> int | None:
    return next((int(config[key]) for key in keys if config.get(key) is not None), None)


def _projected(config: Mapping[str, Any], leaf: str) -> int | None:
    """Number of outputs of a projection of queries, keys or values; None where config.json gives no size of a head."""
    heads, size = attention_heads(config), _first(config, "head_dim")
    if heads is None or size is None:
        return None
    queries, pairs = heads
    wide = {"q_proj": queries, "k_proj": pairs, "v_proj": pairs, "qkv_proj": queries + 2 * pairs}.get(leaf)
    return None if wide is None else wide * size


def _same(headers: ModelHeaders, stored: Stored, what: str, actual: int, stated: int | None) -> None:
    if stated is not None and actual != stated:
        raise CheckpointError(
            f"{stored.file}: tensor {stored.spec.name} has {actual} {what}, "
            f"{headers.path / 'config.json'} asks for {stated}",
            _HINT,
        )


def _below(headers: ModelHeaders, prefix: str) -> Iterator[tuple[int, str, Stored]]:
    """(layer, name below it, tensor) of all tensors of layers."""
    pattern = numbered(prefix)
    for name, stored in headers.tensors.items():
        if found := pattern.match(name):
            yield int(found[1]), name[found.end() :], stored


def _outside(headers: ModelHeaders, spec: ArchSpec, module: str) -> Stored | None:
    """The weight of a module outside of the layers; some checkpoints lack the base model's prefix."""
    name = f"{spec.disk_path(module)}.weight"
    return headers.tensors.get(name) or headers.tensors.get(name.partition(".")[2])
