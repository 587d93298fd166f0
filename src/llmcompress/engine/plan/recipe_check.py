"""All problems of a recipe file, where planning would stop at the first problem."""

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
from llmcompress.recipe import Recipe, format_named, parse, read

_SOUND = [{"method": "rtn"}]  # valid steps, beside which every other section is checked


@dataclass(frozen=True)
class RecipeProblem:
    """What is wrong, and the way out. step: the number of the step that is wrong, from 1; None for anything else."""

    step: int | None
    message: str
    hint: str | None = None


def recipe_problems(file: Path, model: Path | None = None) -> list[RecipeProblem]:
    """The first problem of every section and of every step of the recipe in `file`; if none, of the order of steps.

    A recipe without problems is planned on `model`, if one is given: headers are read, nothing is computed. Where the
    output would be written is not checked.
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
    """The problems of parsing, section by section."""
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
    """The number of the step that a message names."""
    found = re.match(r"step (\d+)\b", message)
    return None if found is None else int(found[1])


def _refuse_unknown_format(recipe: Recipe) -> None:
    format_named(recipe.output.format)


def _nowhere(model: Path) -> Path:
    """A path for an output that is never written: on the disk of the model, if the user may write there."""
    beside = model.resolve().parent
    return (beside if os.access(beside, os.W_OK) else Path(tempfile.gettempdir())) / ".llmcompress-check"
