"""The options of every matrix, from the options of a step and the patterns in its `set`."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from llmcompress.errors import PlanError, RecipeError
from llmcompress.grids.ggml import GgufTypes, gguf_types
from llmcompress.grids.grid_type import gguf_specs, type_of
from llmcompress.ledger import Ledger
from llmcompress.methods.base import DEFAULT_GROUP_SIZES, Method
from llmcompress.pruners.base import Pruner
from llmcompress.recipe import build

Step = TypeVar("Step", Method, Pruner)

_OF_TYPE = ("bits", "group_size", "sym")  # options that mean nothing, or something else, to another type


def matches(pattern: str, module: str) -> bool:
    """Whether a glob pattern fits a module's full name or the end of it, at a dot: 'mlp.down_proj', 'layers.0.*'."""
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[start:]), pattern) for start in range(len(parts)))


def resolve_matrix_options(step: Method, modules: Mapping[str, int], ledger: Ledger) -> dict[str, Method | None]:
    """The step with the options of each module (on-disk name to in_features), None where the module is skipped.

    Later patterns win over earlier patterns; one that gives another type begins with that type's own width and groups.
    Where no group size is given, the largest default that divides every
    width is taken. PlanError for a pattern that matches no module, and for a group size that does not divide a width.
    """
    _check_patterns(step, modules)
    chosen = {module: _own_group(_options(step, module)) for module in modules}
    unnamed = sorted({width for module, width in modules.items() if (item := chosen[module]) and _lacks_group(item)})
    default = _default_group(unnamed, ledger) if unnamed else None
    result: dict[str, Method | None] = {}
    for module, width in modules.items():
        item = chosen[module]
        if item is not None:
            item = item.model_copy(update={"group_size": default}) if _lacks_group(item) else item
            _check_group(item, module, width)
            item.grid_type.refuse(item, module, width)
        result[module] = item
    for module in [module for module, item in result.items() if item is None]:
        ledger.note("unquantised", module, "skipped as asked")
    return result


def resolve_typed_options(step: Method, modules: Iterable[str], types: Mapping[str, str]) -> dict[str, Method | None]:
    """The step with the GGUF type of each module in place of bits and groups, None where nothing rounds the module.

    types: by on-disk tensor; a tensor without one is not rounded. Errors as for `resolve_matrix_options`, and
    RecipeError for a module that is to be skipped.
    """
    _check_patterns(step, modules)
    return {module: _typed(_options(step, module), module, types.get(f"{module}.weight")) for module in modules}


def resolve_pruner_options(step: Pruner, modules: Mapping[str, int]) -> dict[str, Pruner | None]:
    """The pruner with the options of each module (on-disk name to in_features), None where the module is skipped.

    Errors as for `resolve_matrix_options`.
    """
    _check_patterns(step, modules)
    chosen = {module: _options(step, module) for module in modules}
    for module, item in chosen.items():
        if item is not None and item.runs is not None and modules[module] % item.runs.of:
            raise PlanError(
                f"{item.pattern} does not divide the {modules[module]} inputs of {module}",
                "use another --pattern, or leave it out: --set 'PATTERN: {skip: true}'",
            )
        if item is not None and item.by_row and round(item.share * modules[module]) == modules[module]:
            raise PlanError(
                f"a sparsity of {item.share:g} leaves none of the {modules[module]} inputs of {module}",
                "use a lower --sparsity",
            )
    return chosen


def _check_patterns(step: Method | Pruner, modules: Iterable[str]) -> None:
    modules = list(modules)
    for pattern in step.set:
        if not any(matches(pattern, module) for module in modules):
            raise PlanError(f"pattern {pattern!r} of set matches no matrix", f"matrices are called like {modules[0]}")
        for name in sorted(step.undivided.intersection(step.set[pattern])):
            raise PlanError(
                f"{name} of {step.name} is of all matrices, and set asks for it at {pattern!r}", "leave it out"
            )


def _options(step: Step, module: str) -> Step | None:
    own: dict[str, Any] = {**step.model_dump(), "set": {}}
    options = dict(own)
    for pattern, changes in step.set.items():
        if matches(pattern, module):
            kind = changes.get("type", options.get("type"))
            if kind != options.get("type"):
                options = {name: value for name, value in options.items() if name not in _OF_TYPE}
                options |= {name: own[name] for name in _OF_TYPE if kind == own.get("type") and name in own}
            options.update(changes)
    skip = options.pop("skip", False)
    if not isinstance(skip, bool):
        raise RecipeError(f"skip is true or false, not {skip!r}")
    if skip:
        return None
    return build(type(step), options, f"set of step {step.name}")  # type: ignore[no-any-return]


def _typed(item: Method | None, module: str, kind: str | None) -> Method | None:
    """A method with the GGUF type `kind` of its matrix; None where that type is not a grid of blocks."""
    if item is None or gguf_types(item) is None:
        raise RecipeError(f"{module} can be given another type of GGUF, but not left out", "use tensors: of gguf")
    if kind not in gguf_specs():
        return None
    spec = gguf_specs()[kind]
    if item.search == "compat" and not type_of(spec).is_compat(spec):
        raise RecipeError(f"{kind} as llama-quantize rounds it is not known here", "use --search fast or best")
    return item.model_copy(update={"gguf": GgufTypes(type=kind, search=item.search)})


def _own_group(item: Method | None) -> Method | None:
    """A method with the group size of its grid where none is given and the grid has no other."""
    if item is None or item.group_size is not None or item.grid_type.default_group is None:
        return item
    return item.model_copy(update={"group_size": item.grid_type.default_group})


def _lacks_group(item: Method) -> bool:
    return item.grid_type.grouped and item.group_size is None


def _default_group(widths: Iterable[int], ledger: Ledger) -> int:
    widths = list(widths)
    for size in DEFAULT_GROUP_SIZES:
        if all(width % size == 0 for width in widths):
            if size != DEFAULT_GROUP_SIZES[0]:
                stubborn = next(width for width in widths if width % DEFAULT_GROUP_SIZES[0])
                ledger.note(
                    "group_size",
                    "all matrices",
                    f"group size {size}, since {DEFAULT_GROUP_SIZES[0]} does not divide {stubborn}",
                )
            return size
    ledger.note("group_size", "all matrices", f"one scale per row, since no group size divides all of {widths}")
    return -1


def _check_group(item: Method, module: str, width: int) -> None:
    size, kind = item.grid.width(width), item.grid_type
    if width % size == 0 or item.grid.tile is not None:
        return
    fitting = [group for group in kind.group_sizes if width % group == 0]
    if kind.grouped and (fitting or kind.per_row):
        sizes = " or ".join(map(str, fitting[:3]))
        rows = "-1" if not fitting else f"{sizes}, or -1 (one scale per row)" if kind.per_row else sizes
        raise PlanError(f"group size {size} does not divide the {width} inputs of {module}", f"use --group-size {rows}")
    raise PlanError(
        f"{item.grid.name} has blocks of {size}, which do not divide the {width} inputs of {module}",
        "leave it out: --set 'PATTERN: {skip: true}'",
    )
