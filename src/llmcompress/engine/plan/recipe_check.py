"""Everything that is wrong with a recipe file, instead of the first thing alone."""

import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.plan.transform_headers import check_order
from llmcompress.errors import LlmcompressError, RecipeError
from llmcompress.recipe import Recipe, formats, parse, read
from llmcompress.registry import suggest

_SOUND = [{"method": "rtn"}]  # steps to look at everything else with


@dataclass(frozen=True)
class RecipeProblem:
    """What is wrong, at which step (from 1) if it is of one, and the way out."""

    step: int | None
    message: str
    hint: str | None = None


def problems(file: Path, model: Path | None = None) -> list[RecipeProblem]:
    """What is wrong with the recipe in `file`: of every step and section the first thing, then the order of steps.

    Where nothing is, and there is a model, the recipe is planned on it: headers are read, nothing is computed. The
    place of the output is not looked at.
    """
    try:
        data = read(file)
    except RecipeError as error:
        return [_problem(error)]
    found = list(_of_parts(data))
    if found:
        return found
    recipe = parse(data)
    try:
        _refuse_unknown_format(recipe)
        check_order(recipe)
        if model is not None:
            make_plan(recipe, model, Options(out=_nowhere(model), overwrite=True))
    except LlmcompressError as error:
        return [_problem(error, _said(error.message))]
    return []


def _of_parts(data: Any) -> Iterator[RecipeProblem]:
    """What cannot be understood, section by section."""
    if not isinstance(data, dict):
        yield from _wrong(data)
        return
    for key, value in data.items():
        if key != "steps":
            yield from _wrong({"steps": _SOUND, key: value})
    steps = data.get("steps")
    if not isinstance(steps, list) or not steps:
        yield from _wrong({"steps": steps})
        return
    for number, step in enumerate(steps, 1):
        yield from _wrong({"steps": [step]}, number)


def _wrong(data: Any, step: int | None = None) -> Iterator[RecipeProblem]:
    try:
        parse(data)
    except LlmcompressError as error:
        yield _problem(error, step)


def _problem(error: LlmcompressError, step: int | None = None) -> RecipeProblem:
    return RecipeProblem(step, error.message, error.hint)


def _said(message: str) -> int | None:
    """The step that a message speaks of."""
    found = re.match(r"step (\d+)\b", message)
    return None if found is None else int(found[1])


def _refuse_unknown_format(recipe: Recipe) -> None:
    name, known = recipe.output.format, list(formats())
    if name not in known:
        raise RecipeError(f"unknown format {name!r}", suggest(name, known))


def _nowhere(model: Path) -> Path:
    """A place for an output that nothing is written to, on the model's disk if that may be written to."""
    beside = model.resolve().parent
    return (beside if os.access(beside, os.W_OK) else Path(tempfile.gettempdir())) / ".llmcompress-check"
