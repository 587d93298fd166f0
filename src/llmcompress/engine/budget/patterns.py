"""Grids of many matrices as few patterns of `set` that a person can read."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llmcompress.engine.plan.matrix_options import matches
from llmcompress.engine.source.tensor_names import without_numbers
from llmcompress.grids.base import Spec
from llmcompress.grids.grid_type import type_of

Options = dict[str, Any]
Patterns = dict[str, Options]
CHOSEN = ("type", "bits", "group_size")
"""The options by which a step, or a pattern of its `set`, asks for a grid."""


def options_of(grid: Spec) -> Options:
    """The options that ask for a grid; a type with one width and no groups to choose needs no others."""
    kind = type_of(grid)
    width = {} if kind.widths is not None and len(kind.widths) == 1 else {"bits": grid.bits}
    return {"type": kind.name, **width, **({"group_size": grid.group_size} if kind.grouped else {})}


def patterns_of(grids: Mapping[str, Spec], common: Spec) -> Patterns:
    """Patterns of `set` that give every module of `grids` its grid, in a step with that of `common`.

    The first patterns give a place in a layer, such as mlp.down_proj, the grid that it has in most layers. Then come
    layers with another grid, joined by their digits (layers.1[0-35].mlp.down_proj). Later patterns win. Modules that no
    such pattern can tell from others are named in full. Types are named where there are several.
    """
    several = any(grid.type != common.type for grid in grids.values())

    def said(grid: Spec) -> Options:
        options = options_of(grid)
        return options if several else {name: value for name, value in options.items() if name != "type"}

    places: dict[tuple[str, str], dict[int, Spec]] = {}
    for module, grid in grids.items():
        layers, number, place = _parts(module)
        places.setdefault((layers, place), {})[number] = grid
    made: Patterns = {}
    for names, table in _joined(places):
        usual = Counter(table.values()).most_common(1)[0][0]
        if usual != common:
            made |= dict.fromkeys((place for _, place in names), said(usual))
        for grid in dict.fromkeys(grid for grid in table.values() if grid != usual):
            for numbers in _classes(sorted(number for number, other in table.items() if other == grid)):
                made |= dict.fromkeys((f"{layers}.{numbers}.{place}" for layers, place in names), said(grid))
    return made | _corrections({module: said(grid) for module, grid in grids.items()}, said(common), made)


def _parts(module: str) -> tuple[str, int, str]:
    """Name of the list of layers, number of the layer, and the path below it with a * for every other number."""
    found = re.match(r"^(?:.*?\.)?([^.]+)\.(\d+)\.(.+)$", module)
    if found is None:
        return "", 0, module
    return found[1], int(found[2]), without_numbers(found[3])


def _joined(
    places: Mapping[tuple[str, str], Mapping[int, Spec]],
) -> Iterator[tuple[list[tuple[str, str]], Mapping[int, Spec]]]:
    """Joins places that have the same grids in all layers; names that differ in one letter become one pattern."""
    alike: list[tuple[list[tuple[str, str]], Mapping[int, Spec]]] = []
    for name, table in places.items():
        names = next((names for names, other in alike if other == table), None)
        if names is None:
            alike.append(([name], table))
        else:
            names.append(name)
    for names, table in alike:
        yield _spelled(names), table


def _spelled(names: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """q_proj, k_proj and v_proj as [qkv]_proj."""
    found: dict[tuple[str, str, str], str] = {}
    for layers, place in names:
        letter = re.search(r"(?<=\.)([a-z])(?=_[^.]*$)", place)
        before, after = (place[: letter.start()], place[letter.end() :]) if letter else (place, "")
        found[layers, before, after] = found.get((layers, before, after), "") + (letter[1] if letter else "")
    return [
        (layers, before + (f"[{letters}]" if len(letters) > 1 else letters) + after)
        for (layers, before, after), letters in found.items()
    ]


def _classes(numbers: Iterable[int]) -> list[str]:
    """Glob patterns for numbers: those that differ in the last digit share one, as 1[0-35] for 10 to 13 and 15."""
    tens: dict[int, list[int]] = {}
    for number in numbers:
        tens.setdefault(number // 10, []).append(number % 10)
    return [f"{ten or ''}{_digits(units)}" for ten, units in tens.items()]


def _digits(units: Sequence[int]) -> str:
    if len(units) == 1:
        return str(units[0])
    runs: list[list[int]] = []
    for unit in units:
        if runs and runs[-1][-1] == unit - 1:
            runs[-1].append(unit)
        else:
            runs.append([unit])
    spelled = (f"{run[0]}-{run[-1]}" if len(run) > 2 else "".join(map(str, run)) for run in runs)
    return f"[{''.join(spelled)}]"


def _corrections(wanted: Mapping[str, Options], common: Options, made: Patterns) -> Patterns:
    """Patterns that name in full those modules to which `made` gives the options of another grid."""
    wrong: Patterns = {}
    for module, options in wanted.items():
        given = [said for pattern, said in made.items() if matches(pattern, module)]
        if ([common, *given])[-1] != options:
            wrong[module] = options
    return wrong
