"""What every format asks of the matrices it is given."""

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from llmcompress.errors import RunError
from llmcompress.formats import kv_cache
from llmcompress.formats.base import Entry
from llmcompress.grids.base import PER_ROW, Spec
from llmcompress.grids.grid_type import type_of

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded, Grid

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Linears that vLLM and SGLang run as one, by the name they give the result."""

HEADS = ("lm_head", "embed_out")
"""Last parts of the names that families give to the output head."""

Refusal = tuple[str, str]


def quantised(entries: Iterable[Entry]) -> list[tuple[Entry, Spec]]:
    """Entries whose grids engines tell by width, group size and symmetry (`Spec.scaled`), each with its grid."""
    return [(entry, entry.grid) for entry in entries if entry.grid is not None and entry.grid.scaled]


def rounded_inputs(name: str, entries: Iterable[Entry]) -> Refusal | None:
    """Refusal of rounded inputs by a format that cannot say that there are any."""
    for entry in entries:
        if entry.inputs is not None:
            return (
                f"format {name} cannot say that inputs are rounded to {entry.inputs.name} ({entry.module})",
                "use --format compressed-tensors, or --activations none",
            )
    return None


def left_alone(entries: Iterable[Entry]) -> list[Entry]:
    """Matrices that stay in their source type and that a loader might take for linear layers.

    Outside of decoder layers that is every matrix not named like an embedding: head, projections of embeddings.
    """
    return [
        entry
        for entry in entries
        if entry.grid is None
        and len(entry.source.shape) == 2
        and entry.source.name.endswith(".weight")
        and (entry.linear or not (entry.block or _is_embedding(entry.module)))
    ]


def _is_embedding(module: str) -> bool:
    leaf = module.rpartition(".")[2]
    return leaf not in HEADS and re.search(r"emb|wte|wpe", leaf) is not None


def grids(entries: Iterable[Entry]) -> list[Spec]:
    """The distinct grids, the one of most matrices first; ties go to the one met first."""
    return [grid for grid, _ in Counter(grid for _, grid in quantised(entries)).most_common()]


def fused(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Full name of each module that engines run as one -> its members present in the model (at least two).

    All experts of a layer, with all their parts, are one such module, under the name of their list.
    """
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        parent, _, leaf = entry.module.rpartition(".")
        names = [f"{parent}.{name}" for name, members in FUSED.items() if leaf in members]
        if experts := experts_of(entry.module):
            names = [experts]
        for name in names if entry.linear else ():
            found.setdefault(name, []).append(entry)
    return {name: members for name, members in found.items() if len(members) > 1}


def treatments(entries: Iterable[Entry]) -> dict[str, Spec | None]:
    """Full name of each linear of a layer, of each quantised one outside, and of each of another part of a multimodal
    model -> its grid, None if it has none.

    Rules about modules are matched by some engines against the names of fused ones alone: those are there as well,
    where all members have the same.
    """
    entries = list(entries)
    found = {
        entry.module: entry.grid
        for entry in entries
        if entry.linear and (entry.block or entry.grid is not None or entry.runtime is not None)
    }
    for name, members in fused(entries).items():
        if len({entry.grid for entry in members}) == 1:
            found[name] = members[0].grid
    return found


def experts_of(module: str) -> str | None:
    """The list of experts that a module belongs to, such as model.layers.0.mlp.experts; None if to none."""
    listed = re.match(r"(.*\.experts)\.\d+\.", module)
    return listed.group(1) if listed else None


def common_refusal(
    name: str, entries: Iterable[Entry], config: Mapping[str, Any], holds: Container[str]
) -> Refusal | None:
    """What no format that stores codes can hold, whatever the engine: (what and why, the way out).

    holds: names of the grids that the format knows.
    """
    entries = list(entries)
    if refused := kv_cache.refusal(name, entries):
        return refused
    coded = [(entry, entry.grid) for entry in entries if entry.grid is not None]
    for entry, grid in coded:
        if grid.type not in holds:
            return (
                f"format {name} cannot hold {grid.name} ({entry.module})",
                f"use --format {', '.join(type_of(grid).formats)} or dense",
            )
    if not coded:
        return f"format {name} holds quantised models, and no module is to be quantised", "use --format dense"
    for entry, grid in coded:
        if not entry.linear or len(entry.source.shape) != 2 or not entry.source.name.endswith(".weight"):
            return (
                f"format {name} holds codes of linear layers only, and {entry.source.name} is none",
                "leave it in its source type, or use --format dense",
            )
        if not entry.block and not entry.embedding and config.get("tie_word_embeddings"):
            return (
                f"{entry.module} is tied to the embedding, so its codes would be ignored on loading",
                "leave the head in its source type",
            )
        if grid.tile is None and entry.in_features % grid.width(entry.in_features):
            size = grid.width(entry.in_features)
            fitting = [group for group in (128, 64, 32, 16) if entry.in_features % group == 0 and group != size]
            return (
                f"group size {size} does not divide the {entry.in_features} inputs of {entry.module}",
                f"use --group-size {fitting[0] if fitting else PER_ROW}",
            )
    return None


def stored_scale(entry: Entry, coded: "Coded", dtype: str, shape: tuple[int, ...] | None = None) -> "Tensor":
    """Scales [out, groups], or one row for each row of tiles, in the stored type `dtype`.

    shape: in place of that; of one number where all rows have the same. RunError unless the conversion loses nothing.
    """
    tile = coded.grid.spec.tile
    scale = coded.grid.scale if tile is None else coded.grid.scale[:: tile[0]]
    if shape is not None:
        scale = (scale[:1] if prod(shape) == 1 else scale).reshape(shape)
    return stored_type(entry, scale, dtype)


def stored_type(entry: Entry, scale: "Tensor", dtype: str) -> "Tensor":
    """Scales of any shape in the stored type `dtype`; RunError unless the conversion loses nothing."""
    import torch

    types = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
    if dtype not in types:
        raise RunError(f"scales of {entry.module} cannot be stored as {dtype}", "convert the model to float16 first")
    stored = scale.to(types[dtype])
    if not torch.equal(stored.to(torch.float32), scale.to(torch.float32)) or not bool(torch.isfinite(scale).all()):
        raise RunError(
            f"scales of {entry.module} are not exact in {dtype}: codes and stored scales would disagree",
            "leave the matrix as it is: --set 'PATTERN: {skip: true}'",
        )
    return stored


def check_codes(entry: Entry, coded: "Coded") -> None:
    """RunError unless codes, scales, zero points and groups are those of the entry's shape and grid."""
    grid = coded.grid
    rows, width = entry.out_features, entry.in_features
    if entry.grid is None or grid.spec != entry.grid:
        raise RunError(f"{entry.module} was coded on {grid.spec.name}, which is not what was planned")
    if tuple(coded.codes.shape) != (rows, width) or tuple(grid.scale.shape) != (rows, grid.spec.groups(width)):
        raise RunError(f"codes or scales of {entry.module} are not of the shape its weight implies")
    if int(coded.codes.max()) >= grid.spec.levels:
        raise RunError(f"codes of {entry.module} do not fit {grid.spec.bits} bits")
    if grid.spec.zero_points is not None:
        _check_points(entry, grid, *grid.spec.zero_points)
    if not grid.numbers(coded.codes):
        raise RunError(f"codes of {entry.module} are no numbers")
    fixed = entry.inputs is not None and not entry.inputs.dynamic
    if fixed != (coded.input_scale is not None):
        raise RunError(f"{entry.module} {'lacks' if fixed else 'has'} a scale of its inputs, which was not planned")


def affine_grid(entry: Entry, coded: "Coded") -> "Grid":
    """The grid of an entry; RunError if it has no whole zero points."""
    if not coded.grid.spec.affine:
        raise RunError(f"{entry.module} was coded on {coded.grid.spec.name}, which has no zero points")
    return coded.grid


def _check_points(entry: Entry, grid: "Grid", low: int, high: int) -> None:
    """RunError unless zero points, low ... high, and groups are those of the entry."""
    import torch

    if grid.zero.shape != grid.scale.shape:
        raise RunError(f"zero points of {entry.module} are not of the shape its weight implies")
    if bool((grid.zero < low).any()) or bool((grid.zero > high).any()) or bool((grid.zero != grid.zero.round()).any()):
        raise RunError(f"zero points of {entry.module} do not lie on {grid.spec.name}")
    natural = torch.arange(entry.in_features) // grid.spec.width(entry.in_features)
    if not entry.permuted and not torch.equal(grid.group_index.cpu(), natural):
        raise RunError(f"groups of {entry.module} are permuted, which was not planned")


def named(modules: Sequence[str]) -> str:
    """Module names for a sentence: the first, and how many more."""
    return modules[0] if len(modules) == 1 else f"{modules[0]} and {len(modules) - 1} more"
