"""Where a run writes, and whether there is room."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from llmcompress.engine.estimate import Estimate
from llmcompress.engine.gguf_input import called
from llmcompress.errors import PlanError
from llmcompress.methods.base import Method
from llmcompress.recipe import Recipe
from llmcompress.store.output import refuse_unwritable
from llmcompress.store.output_file import is_single, output_of

if TYPE_CHECKING:
    from llmcompress.engine.plan import Options


def places(recipe: Recipe, step: Method, model: Path, options: "Options") -> tuple[Path, Path]:
    """The output and the work directory. PlanError for those that cannot be."""
    beside = model if model.name not in ("", "..") else model.resolve()  # `.` has no name
    name = called(model) if is_single(model) and model.is_file() else model.resolve().name
    out = options.out or beside.with_name(f"{name}-{_called(recipe, step)}")
    output_of(out, recipe.output.format, options.overwrite)  # refuses what it could not create or replace
    work = options.work or out.with_name(f"{out.name}.work")
    refuse_unwritable(work)
    if model.resolve().is_relative_to(out.resolve()):
        raise PlanError(f"{out} is the model itself, or holds it", "choose another --output")
    if work.resolve().is_relative_to(out.resolve()):
        raise PlanError(f"--work {work} is in the output directory", "choose another --work")
    return out, work


def _called(recipe: Recipe, step: Method) -> str:
    """What the default output is called after the model."""
    if step.gguf is not None:
        return f"{step.gguf.type}.gguf" if recipe.output.format == "gguf" else f"{step.name}-{step.gguf.type}"
    if step.type != "int":
        return f"{step.name}-{step.grid.name}"
    group = "" if step.group_size is None else "row" if step.group_size < 0 else f"g{step.group_size}"
    return f"{step.name}-w{step.bits}{group}"


def check_disk(out: Path, work: Path, cost: Estimate) -> None:
    """PlanError if what a run writes does not fit on its disks."""
    for place, need in ((out, cost.output_bytes), (work, cost.work_bytes)):
        parent = next(folder for folder in (place, *place.resolve().parents) if folder.exists())
        free = shutil.disk_usage(parent).free
        if free < need:
            raise PlanError(
                f"{parent} has {free / 1e9:.2f} GB free, {need / 1e9:.2f} GB are needed for {place.name}",
                "free some space, or use --output or --work elsewhere",
            )
