"""The paths that a run writes to, and whether their disks have room."""

import shutil
from collections.abc import Callable
from pathlib import Path

from llmcompress.engine.plan.estimate import Estimate
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import PlanError
from llmcompress.methods.base import Method
from llmcompress.recipe import Recipe
from llmcompress.store.files import existing, refuse_unwritable
from llmcompress.store.gguf_name import stem_of
from llmcompress.store.output_file import in_output, is_single, output_of


def output_and_work(
    recipe: Recipe, model: Path, options: Options, method_suffix: Callable[[Method], str]
) -> tuple[Path, Path]:
    """The paths of the output and of the work directory; PlanError where one of them cannot be written.

    method_suffix: what the default name of the output says of the step that rounds.
    """
    out = options.out or path_beside(model, _default_ending(recipe, method_suffix))
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


def path_beside(model: Path, ending: str) -> Path:
    """The path beside a model whose name is the name of the model, a dash and `ending`.

    Of a GGUF file in an output directory, in which nothing else may be, it is beside that directory.
    """
    if is_single(model) and model.is_file() and in_output(model):
        return model.resolve().parent.with_name(f"{stem_of(model)}-{ending}")
    place = model if model.name not in ("", "..") else model.resolve()  # `.` has no name
    name = stem_of(model) if is_single(model) and model.is_file() else model.resolve().name
    return place.with_name(f"{name}-{ending}")


def _default_ending(recipe: Recipe, method_suffix: Callable[[Method], str]) -> str:
    """The part of the default name of an output that follows the name of the model."""
    parts = [step.name for step in recipe.transforms]
    if recipe.pruner is not None:
        parts.append(f"{recipe.pruner.name}-{recipe.pruner.label.replace(':', 'of')}")
    if recipe.method is not None:
        parts.append(method_suffix(recipe.method))
    return "-".join(parts)


def check_disk(out: Path, work: Path, cost: Estimate) -> None:
    """PlanError if what a run writes does not fit on its disks."""
    check_room((out, cost.output_bytes), (work, cost.work_bytes))


def check_room(*needs: tuple[Path, int]) -> None:
    """PlanError if the disk of a path has fewer bytes free than that path needs."""
    for place, need in needs:
        parent = existing(place)
        free = shutil.disk_usage(parent).free
        if free < need:
            raise PlanError(
                f"{parent} has {free / 1e9:.2f} GB free, {need / 1e9:.2f} GB are needed for {place.name}",
                "free some space, or use --output or --work elsewhere",
            )
