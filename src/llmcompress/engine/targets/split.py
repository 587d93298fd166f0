"""Tensor parallelism: which part of a linear one device holds, and when a model cannot be split at all.

As in vLLM 0.33 and SGLang 0.5.23: the first matrices of attention and MLP are split by outputs (column parallel), the
last ones by inputs (row parallel). Attention is split by whole heads; where there are more devices than key-value
heads, several devices hold a copy of one head.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmcompress.arch.spec import attention_heads
from llmcompress.engine.targets.facts import DeviceLinear, Violation
from llmcompress.formats.base import Entry
from llmcompress.formats.entry_checks import FUSED, fused, quantised

_KEYS_VALUES = frozenset({"k_proj", "v_proj"})
_JOINED_QKV = frozenset({"qkv_proj", "query_key_value", "c_attn"})  # q, k and v stored as one matrix
_JOINED_GATE_UP = frozenset({"gate_up_proj"})
_BY_OUTPUTS = (
    frozenset({"q_proj", "gate_proj", "up_proj", "w1", "w3", "fc1", "c_fc", "dense_h_to_4h"})
    | _KEYS_VALUES
    | _JOINED_QKV
    | _JOINED_GATE_UP
)
_BY_INPUTS = frozenset({"o_proj", "out_proj", "down_proj", "w2", "fc2", "c_proj", "dense", "dense_4h_to_h"})


def shards(entries: Sequence[Entry], config: Mapping[str, Any], tp: int, fuses: bool) -> list[DeviceLinear]:
    """The quantised linears as one of `tp` devices runs them, of a model for which `unsplittable` is empty."""
    heads = attention_heads(config)
    coded = [entry for entry, _ in quantised(entries)]
    merged: dict[str, tuple[Entry, ...]] = {}
    if fuses:
        for name, members in fused(coded).items():
            whole = name.rpartition(".")[2] in FUSED and len({entry.grid for entry in members}) == 1
            merged |= {entry.module: tuple(members) for entry in members if whole}
    found = {members[0].module: members for members in (merged.get(entry.module, (entry,)) for entry in coded)}
    return [
        DeviceLinear(
            members,
            tuple(rows // pieces for entry in members for rows, pieces in _rows(entry, heads, tp)),
            members[0].in_features // (tp if _leaf(members[0]) in _BY_INPUTS else 1),
        )
        for members in found.values()
    ]


def unsplittable(entries: Iterable[Entry], config: Mapping[str, Any], tp: int) -> list[Violation]:
    """Why a model, quantised or not, cannot be split over `tp` devices. Only another number of devices mends that."""
    if tp == 1:
        return []
    heads = attention_heads(config)
    if heads is not None:
        queries, keys = heads
        if queries % tp:
            return [Violation(f"{queries} attention heads cannot be shared out to {tp} devices")]
        if keys % tp and tp % keys:
            return [Violation(f"{keys} key-value heads cannot be shared out to {tp} devices")]
    found: dict[str, list[str]] = {}
    for entry in entries:
        if entry.linear and entry.block and (why := _unsplittable_linear(entry, heads, tp)) is not None:
            found.setdefault(why, []).append(entry.module)
    return [Violation(what, tuple(names)) for what, names in found.items()]


def _unsplittable_linear(entry: Entry, heads: tuple[int, int] | None, tp: int) -> str | None:
    """Why a linear of a layer cannot be split over `tp` devices, None where it can."""
    leaf = _leaf(entry)
    if leaf in _BY_INPUTS:
        return f"{entry.in_features} inputs cannot be split over {tp} devices" if entry.in_features % tp else None
    if leaf in _BY_OUTPUTS:
        ragged = any(rows % pieces for rows, pieces in _rows(entry, heads, tp))
        return f"{entry.out_features} outputs cannot be split over {tp} devices" if ragged else None
    return None if entry.grid is None else "it is not known how a linear of this name is split"


def _leaf(entry: Entry) -> str:
    return entry.module.rpartition(".")[2]


def _rows(entry: Entry, heads: tuple[int, int] | None, tp: int) -> list[tuple[int, int]]:
    """For each part of a matrix: its number of outputs, and the number of devices that divide them."""
    leaf, rows = _leaf(entry), entry.out_features
    keys = tp if heads is None else min(tp, heads[1])
    if leaf in _KEYS_VALUES:
        return [(rows, keys)]
    if leaf in _JOINED_QKV and heads is not None and rows % (heads[0] + 2 * heads[1]) == 0:
        width = rows // (heads[0] + 2 * heads[1])
        return [(width * heads[0], tp), (width * heads[1], keys), (width * heads[1], keys)]
    if leaf in _JOINED_GATE_UP and rows % 2 == 0:
        return [(rows // 2, tp), (rows // 2, tp)]
    return [(rows, tp if leaf in _BY_OUTPUTS else 1)]
