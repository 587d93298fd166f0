"""Falcon H1: attention and Mamba 2 side by side in every layer. Its multipliers become parts of the matrices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from llmcompress.errors import CheckpointError
from llmcompress.formats.gguf.families.state_space import MAMBA2, SCAN2, scan, shapes2
from llmcompress.formats.gguf.family import ATTENTION, GATED, Family
from llmcompress.formats.gguf.hyper import Hyper, whole
from llmcompress.formats.gguf.keys import Key
from llmcompress.formats.gguf.rope import Rope
from llmcompress.formats.gguf.tensors import Factors

# of the gate and of the output of a feed-forward block; of the gate, x, B, C and steps of a state space model
_SEVERAL = {"mlp_multipliers": 2, "ssm_multipliers": 5}
# by role, in the order of multiplication; a place in a list after the colon
_MULTIPLIERS = {
    "token_embd": ("embedding_multiplier",),
    "output": ("lm_head_multiplier",),
    "attn_q": ("attention_in_multiplier",),
    "attn_k": ("key_multiplier", "attention_in_multiplier"),
    "attn_v": ("attention_in_multiplier",),
    "attn_output": ("attention_out_multiplier",),
    "ssm_in": ("ssm_in_multiplier", "ssm_multipliers"),
    "ssm_out": ("ssm_out_multiplier",),
    "ffn_gate": ("mlp_multipliers:0",),
    "ffn_down": ("mlp_multipliers:1",),
}


def _multipliers(config: Mapping[str, Any], name: str) -> list[float]:
    """The numbers of a field, 1 where config.json does not say them; CheckpointError for what is no factor."""
    count = _SEVERAL.get(name, 1)
    said = config.get(name)
    found = [1.0] * count if said is None else said if name in _SEVERAL else [said]
    if not isinstance(found, list | tuple) or len(found) != count or not all(map(_is_factor, found)):
        what = f"{count} numbers" if name in _SEVERAL else "a number"
        raise CheckpointError(f"config.json: {name} is {said!r}, not {what} other than 0", "fetch config.json again")
    return [float(value) for value in found]


def _is_factor(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 1e-30 < abs(value) < 1e30


def _rows(role: str, hyper: Hyper) -> Sequence[int]:
    """Runs of rows that have a factor of their own, by their lengths: those of ssm_in; else all rows of a matrix."""
    if role in ("token_embd", "output"):
        return (hyper.vocabulary,)
    sizes = scan(hyper)
    if role == "ssm_in":
        of_groups = sizes.groups * sizes.state
        return (sizes.inner, sizes.inner, of_groups, of_groups, sizes.ranks)
    heads = {"attn_q": hyper.heads, "attn_k": hyper.heads_kv, "attn_v": hyper.heads_kv}.get(role)
    return (hyper.inner if role == "ffn_gate" else hyper.hidden if heads is None else heads * hyper.head_dim,)


def _factors(role: str, hyper: Hyper) -> Factors:
    lengths = _rows(role, hyper)
    found = []
    for field in _MULTIPLIERS.get(role, ()):
        name, _, at = field.partition(":")
        numbers = _multipliers(hyper.config, name)
        by_run = numbers if len(numbers) == len(lengths) else [numbers[int(at or 0)]] * len(lengths)
        if any(factor != 1 for factor in by_run):
            found.append(tuple(zip(lengths, by_run, strict=True)))
    return tuple(found)


def _meant(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the width of a head of the state space model, which may be left to the others ("auto")."""
    if config.get("mamba_d_head") != "auto":
        return config
    stated = config.get("mamba_d_ssm") is not None
    inner = whole(config, "mamba_d_ssm") if stated else whole(config, "mamba_expand") * whole(config, "hidden_size")
    return {**config, "mamba_d_head": inner // whole(config, "mamba_n_heads")}


def _layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    normed = bool(hyper.config.get("mamba_rms_norm"))
    mixer = tuple(role for role in SCAN2 if normed or role != "ssm_norm")
    return (*ATTENTION, *mixer, *GATED)


def _objection(hyper: Hyper) -> str | None:
    config = hyper.config
    if config.get("mamba_rms_norm") and config.get("mamba_norm_before_gate") is not False:
        return (
            "config.json: mamba_norm_before_gate is not false, llama.cpp computes falcon_h1 models with the gate first"
        )
    limit = config.get("time_step_limit")
    if limit not in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]):  # as transformers writes it
        return f"config.json: time_step_limit is {limit}, llama.cpp computes falcon_h1 models without one"
    return None


def _keys(hyper: Hyper, rope: Rope) -> list[Key]:
    return scan(hyper).keys("falcon-h1", True)


FAMILY = Family(
    name="falcon_h1",
    model_types=("falcon_h1",),
    arch="falcon-h1",
    head_needed=True,
    ropes=("default",),
    layer=_layer,
    bare=("ffn_norm",),
    biased=("ssm_conv1d",),
    biases=(),
    forms={"ssm_a": "decay"},
    reshaped=MAMBA2,
    shapes=shapes2,
    meant=_meant,
    factors=_factors,
    keys=_keys,
    objection=_objection,
    only={
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "projectors_bias": (False, None),
        "mamba_proj_bias": (False, None),
        "mamba_conv_bias": (True, None),
    },
)
