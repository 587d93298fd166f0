"""Repair: a recipe is changed so that a target loads the result. Options of modules change, or the format does.

The changed recipe is the one that is carried out and written, and each change is an entry of the ledger.
"""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from llmcompress.engine.plan.matrix_options import matches
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.targets.base import Target
from llmcompress.engine.targets.facts import Changes, Violation
from llmcompress.engine.targets.machine import Machine
from llmcompress.engine.targets.verdicts import label, remarks, violations
from llmcompress.errors import PlanError
from llmcompress.formats.base import Entry
from llmcompress.formats.entry_checks import named, quantised
from llmcompress.ledger import LedgerEntry
from llmcompress.recipe import Recipe, build, formats

_ROUNDS = 20  # a repair may cause the next violation; no recipe needs so many rounds
_EVERYWHERE = "all matrices"


def repaired_plan(
    draft: Callable[[Recipe], Plan], recipe: Recipe, target: Target, machine: Machine, repair: bool
) -> Plan:
    """A plan whose result the target loads on a machine. draft: makes a plan of a recipe.

    Where the target does not load the result of `recipe` itself, `repair` allows to change the recipe; PlanError
    without it, and where no repair is known.
    """
    plan = draft(recipe)
    # a repaired recipe names its group size, so that planning it notes no default any more
    sizes = [entry for entry in plan.ledger if entry.kind == "group_size"]
    notes: list[LedgerEntry] = []
    for _ in range(_ROUNDS):
        checkpoint = plan.entries, plan.headers.config, machine
        found = violations(target, plan.format.name, *checkpoint)
        if not found:
            break
        first = found[0]
        another = None if first.changes else other_format(target, plan.format.name, *checkpoint)
        if not repair or not (first.changes or another):
            raise _refused(first, target, machine, another)
        if another is not None:
            done = [("format", f"{another} instead of {plan.format.name}")]
            recipe = recipe.model_copy(update={"output": recipe.output.model_copy(update={"format": another})})
        else:
            recipe, done = repaired_recipe(recipe, plan.entries, first.changes)
        purpose = f"so that {label(target, machine)} loads it: {first.what}"
        notes += [LedgerEntry("target", subject, f"{change}, {purpose}") for subject, change in done]
        plan = draft(recipe)
    else:
        raise PlanError(f"no repair was found within {_ROUNDS} steps: {first}", first.by_hand or None)
    notes += [
        LedgerEntry("target", target.name, remark)
        for remark in remarks(target, plan.format.name, plan.entries, plan.headers.config, machine)
    ]
    return plan.with_notes([*sizes, *notes])


def _refused(violation: Violation, target: Target, machine: Machine, another: str | None) -> PlanError:
    ways = []
    if violation.changes or another:
        ways.append(f"pass --repair to {violation.mending if violation.changes else f'write format {another}'}")
    if violation.by_hand or another:
        ways.append(violation.by_hand or f"use --format {another}")
    subject = named(violation.modules) if violation.modules else "this"
    devices = f" on {machine.tp} devices" if machine.tp > 1 and target.tensor_parallel else ""
    hint = ", or ".join(ways) or "use --format dense"
    return PlanError(f"{target.title} does not load {subject}{devices}: {violation.what}", hint)


def other_format(
    target: Target, format_: str, entries: Sequence[Entry], config: Mapping[str, Any], machine: Machine
) -> str | None:
    """Another format in which the target loads the same matrices. Decoded weights only where codes do not survive."""
    for name in target.formats:
        if name == format_ or (name == "dense" and not target.decodes):
            continue
        if not formats()[name].refuses(entries, config) and not violations(target, name, entries, config, machine):
            return name
    return None


def repaired_recipe(recipe: Recipe, entries: Sequence[Entry], changes: Changes) -> tuple[Recipe, list[tuple[str, str]]]:
    """A recipe that makes `changes` and leaves all other matrices as planned; and (subject, what) of every change.

    entries: of the plan of `recipe`. An option that all matrices then share becomes an option of the step; any other
    option becomes a pattern.
    """
    step = recipe.method
    assert step is not None  # only what a step rounds can be repaired
    options = step.model_dump()
    patterns: dict[str, dict[str, Any]] = options.pop("set")
    planned = {entry.module: entry for entry, _ in quantised(entries)}
    left = {module: dict(change) for module, change in changes.items()}
    grouped = step.grid_type.grouped and options["group_size"] is None
    if grouped and any({"group_size", "skip"} & set(change) for change in left.values()):
        # else the default would be chosen anew among what remains
        options["group_size"] = _default_group(patterns, planned)
    shared = _shared_options(left, planned)
    done = [(_EVERYWHERE, f"{key}: {_shown(value)}") for key, value in shared.items()]
    options |= shared
    left = _without(left, shared)
    patterns = {name: pattern for name, pattern in _without(patterns, shared).items() if pattern}
    for change, modules in _alike(left):
        for pattern in _patterns(modules, change, planned, patterns):
            kept = _in_force(pattern, planned, patterns) if pattern in patterns else None
            patterns.pop(pattern, None)  # the last pattern wins
            patterns[pattern] = {**(kept or {}), **change}
            done.append((pattern, ", ".join(f"{key}: {_shown(value)}" for key, value in change.items())))
    new = build(type(step), {**options, "set": patterns}, f"the repaired step {step.name}")
    steps = tuple(new if other is step else other for other in recipe.steps)
    return recipe.model_copy(update={"steps": steps, "expected": None}), done


def _shared_options(changes: Changes, planned: Mapping[str, Entry]) -> dict[str, Any]:
    """The changed options that all planned matrices have in common once the changes are made."""
    return {
        key: value
        for key, value in dict.fromkeys((key, value) for change in changes.values() for key, value in change.items())
        if key != "skip"
        and all(changes.get(module, {}).get(key, _now(entry, key)) == value for module, entry in planned.items())
    }


def _without(options: Mapping[str, Mapping[str, Any]], keys: Container[str]) -> dict[str, dict[str, Any]]:
    """Options by module or pattern, without those of the given keys."""
    return {name: {key: value for key, value in item.items() if key not in keys} for name, item in options.items()}


def _default_group(patterns: Mapping[str, Mapping[str, Any]], planned: Mapping[str, Entry]) -> int | None:
    """The group size that planning chose as the default, if any matrix has the default."""
    for module, entry in planned.items():
        named_ = any("group_size" in options and matches(pattern, module) for pattern, options in patterns.items())
        if not named_ and entry.grid is not None:
            return entry.grid.group_size
    return None


def _now(entry: Entry, key: str) -> Any:
    """The planned value of an option of a matrix; None for an option that the grid does not tell."""
    assert entry.grid is not None
    return {"bits": entry.grid.bits, "group_size": entry.grid.group_size, "sym": entry.grid.symmetric}.get(key)


def _alike(changes: Changes) -> list[tuple[dict[str, Any], list[str]]]:
    """Every distinct change, with the modules that it is made to."""
    grouped: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for module, change in changes.items():
        if change:
            grouped.setdefault(tuple(sorted(change.items())), []).append(module)
    return [(dict(change), modules) for change, modules in grouped.items()]


def _patterns(
    modules: Sequence[str],
    change: Mapping[str, Any],
    planned: Mapping[str, Entry],
    taken: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Patterns that match `modules` and no module that `change` would alter: by path below a layer, by layer and path,
    and at last by full name."""
    found, left = [], list(modules)
    for spelling in (r"^.*?\.\d+\.", r"^(.*?\.\d+\.)"):
        places: dict[str, list[str]] = {}
        for module in left:
            above = re.match(spelling, module)
            below = re.sub(r"(?<=\.)\d+(?=\.)", "*", module[above.end() :] if above else module)
            places.setdefault("".join(above.groups() if above else ()) + below, []).append(module)
        for pattern, members in places.items():
            others = {module for module in planned if matches(pattern, module)} - set(members)
            same = all(_now(planned[module], key) == value for module in others for key, value in change.items())
            if same and (pattern not in taken or _in_force(pattern, planned, taken) is not None):
                found.append(pattern)
                left = [module for module in left if module not in members]
    return found + left


def _in_force(
    pattern: str, planned: Mapping[str, Entry], patterns: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """The options that are in force where `pattern` matches; None if they differ from module to module.

    A pattern whose options are the same everywhere can be moved to the end.
    """
    ends = []
    for module in planned:
        if matches(pattern, module):
            merged: dict[str, Any] = {}
            for other, options in patterns.items():
                if matches(other, module):
                    merged |= options
            ends.append({key: merged[key] for key in patterns.get(pattern, {})})
    return ends[0] if ends and all(end == ends[0] for end in ends) else None


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
