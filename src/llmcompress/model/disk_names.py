"""What the tensors of a checkpoint are called that are the parameters of transformers' model.

transformers renames, merges and splits tensors while it loads them. Its own rules are asked here which parameter every
name on disk leads to; for parameters that several tensors make up, they are tried on a few numbers to see where each
tensor comes to lie. Names are compared, no tensor is read.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from llmcompress.errors import CheckpointError
from llmcompress.model.experts import ExpertLayout, split
from llmcompress.store.expert_stacks import ExpertStack

_NUMBERED = re.compile(r"(.*?)\.([0-9]{1,9})\.(.*)")


@dataclass(frozen=True)
class DiskNames:
    """disk, joined: as in ArchSpec. separate: whether the matrices of experts are on disk one by one.

    stacked: names of the tensors that hold a parameter of all experts, with its layer, its block, and its path below
    the block. merged: whether transformers puts separate matrices together.
    """

    disk: dict[str, str] = field(default_factory=dict)
    joined: dict[str, tuple[str, ...]] = field(default_factory=dict)
    stacked: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    separate: bool = False
    merged: bool = False


@dataclass
class _Source:
    """The tensors that a parameter is made of, by the pattern of the rule that says so; without a rule by "".

    rule: what joins them.
    """

    rule: WeightConverter | None
    names: dict[str, list[str]] = field(default_factory=dict)


def disk_names(model: nn.Module, layers: str, names: Collection[str], blocks: Mapping[str, ExpertLayout]) -> DiskNames:
    """Names of a checkpoint's tensors for transformers' `model`, its experts fused.

    layers: module path of the list of layers. blocks: layouts of blocks of experts by their paths below a layer.
    CheckpointError if layers differ in what they call one parameter.
    """
    found: dict[str, str] = {}
    result = DiskNames(separate=_has_separate(names, blocks))
    prefixes = {layers}
    parameters = {f"{block}.{leaf}": (block, leaf) for block, layout in blocks.items() for leaf in layout.stacks}

    def note(below: str, name: str) -> None:
        if found.setdefault(below, name) != name:
            raise CheckpointError(f"{below} is called {found[below]} in one layer, {name} in another")

    for parameter, source in _sources(model, names).items():
        place = _NUMBERED.fullmatch(parameter.removeprefix(f"{layers}"))
        number, below = (place[2], place[3]) if parameter.startswith(f"{layers}.") and place else (None, parameter)
        parts = {pattern: [_below(name, number) for name in many] for pattern, many in source.names.items()}
        prefixes |= {prefix for many in parts.values() for prefix, _ in many if prefix}
        local = {pattern: [name for _, name in many] for pattern, many in parts.items()}
        if below in parameters:
            block, leaf = parameters[below]
            for path, name in _of_experts(source.rule, local, blocks[block].stacks[leaf]):
                note(f"{block}.{{e}}.{path}", name)
                result = replace(result, separate=True, merged=True)
            if source.rule is None and number is not None:
                result.stacked[source.names[""][0]] = number, block, leaf
        if source.rule is None:
            note(below, local[""][-1])
        elif [type(step) for step in source.rule.operations] == [Concatenate] and source.rule.operations[0].dim == 0:
            joined = tuple(name for pattern in source.rule.source_patterns for name in local.get(pattern, ()))
            if result.joined.setdefault(below, joined) != joined:
                raise CheckpointError(f"{below} is made of {joined} in one layer, of others in another")
    result.disk.update(_shortest(found, layers))
    other = prefixes - {layers, layers.partition(".")[2]}
    if len(other) > 1:
        raise CheckpointError(f"layers are called {' and '.join(sorted(other))} on disk")
    result.disk.update((layers, prefix) for prefix in other)
    return result


def parameters_of(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """By the name of a parameter of `model`, the tensor that it is alone, for all that are one tensor unchanged."""
    sources = _sources(model, names)
    return {parameter: source.names[""][-1] for parameter, source in sources.items() if source.rule is None}


def _sources(model: Any, names: Collection[str]) -> dict[str, _Source]:
    """What each parameter and stored buffer is made of, as transformers' loader finds it."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known = model.state_dict()
    found: dict[str, _Source] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target in known:
            source = found.setdefault(target, _Source(by_pattern[pattern] if pattern else None))
            source.names.setdefault(pattern or "", []).append(name)
    return found


def _below(name: str, number: str | None) -> tuple[str, str]:
    """The on-disk path of the list of layers and the name below layer `number`; no path for what stands outside."""
    place = _NUMBERED.fullmatch(name) if number is not None else None
    return (place[1], place[3]) if place and place[2] == number else ("", name)


def _has_separate(names: Collection[str], blocks: Mapping[str, ExpertLayout]) -> bool:
    """Whether experts are on disk under the names that they have as separate modules."""
    last = {f".{block}.{layout.count - 1}.{part}" for block, layout in blocks.items() for part in layout.parts}
    return any(f".{name}".endswith(tuple(last)) for name in names)


def _of_experts(
    rule: WeightConverter | None, local: Mapping[str, list[str]], stack: ExpertStack
) -> Iterator[tuple[str, str]]:
    """Path below an expert and on-disk name, with `{e}` for its number, of the parts of one parameter of a block."""
    if rule is None:
        return
    for path, pattern in _tried(rule, stack):
        names = local.get(pattern, [])
        general = _numbered(names) if len(names) >= stack.experts else None
        if general is not None:
            yield path, general


def _tried(rule: WeightConverter, stack: ExpertStack) -> Iterator[tuple[str, str]]:
    """Path below an expert of what each pattern of a rule becomes; only of what is neither turned nor reordered."""
    tags = {
        pattern: [torch.arange(6).reshape(2, 3) + 6 * (2 * place + number) for number in range(2)]
        for place, pattern in enumerate(rule.source_patterns)
    }
    moved: dict[str, Any] = {pattern: list(tensors) for pattern, tensors in tags.items()}
    for step in rule.operations:
        try:
            moved = step.convert(moved, source_patterns=rule.source_patterns, target_patterns=rule.target_patterns)
        except (LookupError, RuntimeError, TypeError, ValueError):
            return  # it wants more than a few numbers, and does more than putting matrices together
    (value,) = moved.values()
    merged: Tensor = value[0] if isinstance(value, list) else value
    for path, stacked in split(stack, merged) if merged.ndim == 3 else ():
        for pattern, tensors in tags.items():
            if torch.equal(stacked, torch.stack(tensors)):
                yield path, pattern


def _numbered(names: list[str]) -> str | None:
    """The names with `{e}` in place of the only number that tells them apart; None unless they count from 0."""
    first, second = names[0].split("."), names[1].split(".") if len(names) > 1 else ["1"]
    place = next(
        (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if (one, other) == ("0", "1")), None
    )
    if place is None:
        return None
    general = ".".join([*first[:place], "{e}", *first[place + 1 :]])
    return general if all(general.format(e=number) == name for number, name in enumerate(names)) else None


def _shortest(found: Mapping[str, str], layers: str) -> dict[str, str]:
    """The entries of ArchSpec.disk that say what all parameters are called: of modules where that is enough."""
    modules: dict[str, str] = {}
    for path, name in found.items():
        if path.endswith(".weight") and name.endswith(".weight") and path != name:
            modules[path.removesuffix(".weight")] = name.removesuffix(".weight")
    for path, name in found.items():
        module, dot, leaf = path.rpartition(".")
        if f"{modules.get(module, module)}{dot}{leaf}" != name:
            modules[path] = name
    base = layers.partition(".")[0]  # whose name may be missing in all names, which needs no saying
    return {path: name for path, name in modules.items() if name != path.removeprefix(f"{base}.")}
