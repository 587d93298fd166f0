"""Rotary embedding and its scaling, from both styles of config.json, and what GGUF files say of it.

Older configs have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`, which may hold one set for full and
one for sliding attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log, pi, sqrt
from typing import Any

from llmcompress.errors import CheckpointError, PlanError
from llmcompress.formats.gguf.hyper import number, whole
from llmcompress.formats.gguf.keys import Key, f32, text, u32

# What transformers takes for a model type whose config.json leaves it out, where that is not 10,000 or all of a head.
_THETA = 10000.0
_THETAS = {
    "cohere": 5e5, "ernie4_5": 5e5, "ernie4_5_moe": 5e5, "hy_v3": 11158840.0, "lfm2": 1e6, "lfm2_moe": 1e6,
    "llama4_text": 5e5, "minimax": 1e6, "minimax_m2": 5e6, "minimax_m3_vl_text": 5e6, "smollm3": 2e6, "solar_open": 1e6,
}  # fmt: skip
_SHARES = {"glm": 0.5, "glm4": 0.5, "glm4_moe": 0.5, "nemotron": 0.5, "phi": 0.5, "stablelm": 0.25}
# Of these it takes a scaling, or a base for each kind of attention.
_TOLD = frozenset(
    {"apertus", "gemma3n_text", "gemma4_text", "gpt_oss", "laguna", "mellum", "mimo_v2_flash", "ministral3", "olmo3"}
)


@dataclass(frozen=True)
class Rope:
    """theta: base of the frequencies; local_theta: that of sliding attention, where it has its own. kind: of scaling.

    partial: share of a head that is rotated. scaling: the parameters of the scaling.
    """

    theta: float
    local_theta: float | None
    kind: str
    partial: float
    scaling: Mapping[str, Any] = field(default_factory=dict)

    def dimensions(self, head_dim: int) -> int:
        """Values of a head that are rotated."""
        return int(self.partial * head_dim)


def read_rope(config: Mapping[str, Any]) -> Rope:
    """The rotary embedding of a config.json; CheckpointError for what is no number or no object, or is missing."""
    kind = str(config.get("model_type"))
    nested = _section(config, "rope_parameters") or _section(config, "rope_scaling")
    main = _section(nested, "full_attention") or nested
    local = _section(nested, "sliding_attention")
    merged = {**config, **{key: value for key, value in main.items() if value is not None}}
    thetas = ("rope_theta", "rotary_emb_base")
    stated = any(merged.get(key) is not None for key in thetas)
    if kind in _TOLD and not stated:
        raise CheckpointError(
            f"config.json does not say how positions are rotated (rope_parameters), in which {kind} models differ",
            "save the config anew with transformers",
        )
    local_theta = number({**config, **local}, "rope_theta") if local else None
    if not local and config.get("rope_local_base_freq") is not None:
        local_theta = number(config, "rope_local_base_freq")
    shares = ("partial_rotary_factor", "rotary_pct")
    scaled = str(main.get("rope_type") or main.get("type") or "default")
    return Rope(
        theta=number(merged, *thetas) if stated else _THETAS.get(kind, _THETA),
        local_theta=local_theta,
        kind="longrope" if scaled == "su" else scaled,
        partial=number(merged, *shares)
        if any(merged.get(key) is not None for key in shares)
        else _SHARES.get(kind, 1.0),
        scaling=merged,
    )


def scaling_keys(arch: str, rope: Rope) -> list[Key]:
    """Keys of linear and yarn scaling; other kinds have tensors instead, or none."""
    if rope.kind not in ("linear", "yarn"):
        return []
    prefix = f"{arch}.rope.scaling"
    keys = [text(f"{prefix}.type", rope.kind), f32(f"{prefix}.factor", number(rope.scaling, "factor"))]
    if rope.kind == "linear":
        return keys
    keys.append(u32(f"{prefix}.original_context_length", original_context(rope)))
    for name, given in (
        ("yarn_ext_factor", "extrapolation_factor"),
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if rope.scaling.get(given) is not None:
            keys.append(f32(f"{prefix}.{name}", number(rope.scaling, given)))
    return keys


def original_context(rope: Rope) -> int:
    """Positions the model was trained on before its context was stretched."""
    return whole(rope.scaling, "original_max_position_embeddings", "max_position_embeddings")


def llama3_factors(rope: Rope, head_dim: int) -> tuple[float, ...]:
    """What Llama 3.1's scaling divides each frequency by: high ones stay, low ones are slowed, those between blend."""
    factor, low, high = (number(rope.scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = original_context(rope)
    if not (factor >= 1 and 0 < low < high):
        raise CheckpointError(f"config.json: llama3 scaling by {factor} from {low} to {high} makes no sense")
    found = []
    for pair in range(rope.dimensions(head_dim) // 2):
        wavelength = 2 * pi * rope.theta ** (2 * pair / head_dim)
        share = min(1.0, max(0.0, (context / wavelength - low) / (high - low)))
        found.append(1 / ((1 - share) / factor + share))
    return tuple(found)


def longrope_factors(rope: Rope, head_dim: int, which: str) -> tuple[float, ...]:
    """`short_factor` or `long_factor` of a longrope scaling: one number per rotated pair."""
    values = rope.scaling.get(which)
    pairs = rope.dimensions(head_dim) // 2
    if not isinstance(values, list) or len(values) != pairs:
        raise CheckpointError(f"config.json: {which} of the rope scaling is not a list of {pairs} numbers")
    return tuple(number({which: value}, which) for value in values)


def longrope_attention(rope: Rope, context: int) -> float:
    """The factor by which longrope scales cosines and sines; computed from the stretch unless config.json gives it."""
    if rope.scaling.get("attention_factor") is not None:
        return number(rope.scaling, "attention_factor")
    original = original_context(rope)
    return sqrt(1 + log(context / original) / log(original)) if context > original > 1 else 1.0


def refuse_other(rope: Rope, known: tuple[str, ...], family: str) -> None:
    """PlanError for a scaling that llama.cpp does not know for a family."""
    if rope.kind not in known:
        raise PlanError(
            f"rope scaling {rope.kind!r} of config.json cannot be told to llama.cpp for {family}",
            f"it knows {', '.join(known)}",
        )


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {key} is {value!r}, not an object")
    return value or {}
