"""From a step and its patterns to the options of every matrix."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from llmcompress.errors import PlanError, RecipeError
from llmcompress.grids.base import BLOCK_TYPES, PER_ROW, PROGRESSIVE_GROUPS
from llmcompress.ledger import Ledger
from llmcompress.methods.base import DEFAULT_GROUP_SIZES, GROUPED_TYPES, GgufTypes, Method
from llmcompress.pruners.base import Pruner
from llmcompress.recipe import build

Step = TypeVar("Step", Method, Pruner)


def matches(pattern: str, module: str) -> bool:
    """Whether a glob pattern fits a module's full name or the end of it, at a dot: 'mlp.down_proj', 'layers.0.*'."""
    parts = module.split(".")
    try:
        return any(fnmatchcase(".".join(parts[start:]), pattern) for start in range(len(parts)))
    except re.error as error:  # Python 3.10 takes [z-a] for a range
        raise RecipeError(f"pattern {pattern!r} of set is none: {error}") from None


def resolve(
    step: Method, modules: Mapping[str, int], ledger: Ledger, types: Mapping[str, str] | None = None
) -> dict[str, Method | None]:
    """Options of each module (name to in_features), None where it is to be skipped.

    Later patterns win over earlier ones. Without a group size the largest default that divides every width is taken.
    PlanError for a pattern that matches nothing or a group size that does not divide a width. types: of GGUF by on-disk
    tensor, in place of bits and groups.
    """
    _check_patterns(step, modules)
    chosen = {module: _options(step, module) for module in modules}
    if types is not None:
        return {module: _typed(item, module, types[f"{module}.weight"]) for module, item in chosen.items()}
    chosen = {module: _per_row(item) for module, item in chosen.items()}
    unnamed = sorted({width for module, width in modules.items() if (item := chosen[module]) and _lacks_group(item)})
    default = _default_group(unnamed, ledger) if unnamed else None
    result: dict[str, Method | None] = {}
    for module, width in modules.items():
        item = chosen[module]
        if item is not None:
            item = item.model_copy(update={"group_size": default}) if _lacks_group(item) else item
            _check_group(item, module, width)
            _check_outliers(item, module, width)
        result[module] = item
    return result


def resolve_pruner(step: Pruner, modules: Mapping[str, int]) -> dict[str, Pruner | None]:
    """Options of each module (name to in_features), None where it is to be skipped; errors as for `resolve`."""
    _check_patterns(step, modules)
    chosen = {module: _options(step, module) for module in modules}
    for module, item in chosen.items():
        if item is not None and item.runs is not None and modules[module] % item.runs.of:
            raise PlanError(
                f"{item.pattern} does not divide the {modules[module]} inputs of {module}",
                "use another --pattern, or leave it out: --set 'PATTERN: {skip: true}'",
            )
    return chosen


def _check_patterns(step: Method | Pruner, modules: Iterable[str]) -> None:
    modules = list(modules)
    for pattern in step.set:
        if not any(matches(pattern, module) for module in modules):
            raise PlanError(f"pattern {pattern!r} of set matches no matrix", f"matrices are called like {modules[0]}")


def _options(step: Step, module: str) -> Step | None:
    changes: dict[str, Any] = {}
    for pattern, options in step.set.items():
        if matches(pattern, module):
            changes.update(options)
    skip = changes.pop("skip", False)
    if not isinstance(skip, bool):
        raise RecipeError(f"skip is true or false, not {skip!r}")
    if skip:
        return None
    plain = step.model_dump()
    return build(type(step), {**plain, "set": {}, **changes}, f"set of step {step.name}")  # type: ignore[no-any-return]


def _typed(item: Method | None, module: str, kind: str) -> Method | None:
    """A method with the type of GGUF that its matrix gets; None where that is no grid."""
    if item is None or item.gguf is None:
        raise RecipeError(f"{module} can be given another type of GGUF, but not left out", "use tensors: of gguf")
    if kind not in BLOCK_TYPES:
        return None
    return item.model_copy(update={"gguf": GgufTypes(type=kind, search=item.search)})


def _per_row(item: Method | None) -> Method | None:
    """A method with one scale per row where nothing is asked for and its codes know no groups."""
    if item is None or item.group_size is not None or item.type != "fp8":
        return item
    return item.model_copy(update={"group_size": PER_ROW})


def _lacks_group(item: Method) -> bool:
    return item.type in GROUPED_TYPES and item.group_size is None


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


def _check_outliers(item: Method, module: str, width: int) -> None:
    if item.outliers != "none" and item.outlier_count >= width:
        raise PlanError(
            f"{item.outlier_count} outlier channels leave nothing to round of the {width} inputs of {module}",
            f"use an outlier_count below {width}, or leave the matrix out: --set 'PATTERN: {{skip: true}}'",
        )


def _check_group(item: Method, module: str, width: int) -> None:
    size = item.grid.width(width)
    if width % size and item.type == "progressive" and any(width % group == 0 for group in PROGRESSIVE_GROUPS):
        divisors = [str(group) for group in PROGRESSIVE_GROUPS if width % group == 0]
        raise PlanError(
            f"group size {size} does not divide the {width} inputs of {module}",
            f"use --group-size {' or '.join(divisors)}",
        )
    if width % size and item.type != "int":
        raise PlanError(
            f"{item.grid.name} has blocks of {size}, which do not divide the {width} inputs of {module}",
            "leave it out: --set 'PATTERN: {skip: true}'",
        )
    if width % size:
        fitting = [g for g in (256, 192, 128, 96, 64, 48, 32, 16) if width % g == 0]
        hint = (
            f"use --group-size {' or '.join(map(str, fitting[:3]))}, or -1 (one scale per row)"
            if fitting
            else "use --group-size -1"
        )
        raise PlanError(f"group size {size} does not divide the {width} inputs of {module}", hint)
