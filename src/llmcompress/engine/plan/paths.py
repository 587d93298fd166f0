"""Where a run writes, and whether there is room."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from llmcompress.engine.plan.estimate import Estimate
from llmcompress.errors import PlanError
from llmcompress.recipe import Recipe
from llmcompress.store.files import existing
from llmcompress.store.gguf_name import stem_of
from llmcompress.store.output import refuse_unwritable
from llmcompress.store.output_file import is_single, output_of

if TYPE_CHECKING:
    from llmcompress.engine.plan.options import Options


def places(recipe: Recipe, model: Path, options: "Options") -> tuple[Path, Path]:
    """The output and the work directory. PlanError for those that cannot be."""
    out = options.out or called_after(model, _called(recipe))
    output_of(out, recipe.output.format, options.overwrite)  # refuses what it could not create or replace
    work = options.work or out.with_name(f"{out.name}.work")
    refuse_unwritable(work)
    refuse_model_itself(out, model)
    if work.resolve().is_relative_to(out.resolve()):
        raise PlanError(f"--work {work} is in the output directory", "choose another --work")
    return out, work


def refuse_model_itself(out: Path, model: Path) -> None:
    """PlanError if an output would replace the model that it is made from."""
    if model.resolve().is_relative_to(out.resolve()):
        raise PlanError(f"{out} is the model itself, or holds it", "choose another --output")


def called_after(model: Path, ending: str) -> Path:
    """The place beside a model that is called after it."""
    place = model if model.name not in ("", "..") else model.resolve()  # `.` has no name
    name = stem_of(model) if is_single(model) and model.is_file() else model.resolve().name
    return place.with_name(f"{name}-{ending}")


def _called(recipe: Recipe) -> str:
    """What the default output is called after the model."""
    parts = [step.name for step in recipe.transforms]
    if recipe.pruner is not None:
        parts.append(f"{recipe.pruner.name}-{recipe.pruner.label.replace(':', 'of')}")
    return "-".join((*parts, *([_named(recipe)] if recipe.method else ())))


def _named(recipe: Recipe) -> str:
    step = recipe.method
    assert step is not None
    if step.gguf is not None:
        return f"{step.gguf.type}.gguf" if recipe.output.format == "gguf" else f"{step.name}-{step.gguf.type}"
    group = (
        "" if step.group_size is None or step.type != "int" else "row" if step.group_size < 0 else f"g{step.group_size}"
    )
    return f"{step.name}-{step.label}{group}"


def check_disk(out: Path, work: Path, cost: Estimate) -> None:
    """PlanError if what a run writes does not fit on its disks."""
    check_room((out, cost.output_bytes), (work, cost.work_bytes))


def check_room(*needs: tuple[Path, int]) -> None:
    """PlanError if a place has not as many bytes free as are needed there."""
    for place, need in needs:
        parent = existing(place)
        free = shutil.disk_usage(parent).free
        if free < need:
            raise PlanError(
                f"{parent} has {free / 1e9:.2f} GB free, {need / 1e9:.2f} GB are needed for {place.name}",
                "free some space, or use --output or --work elsewhere",
            )
