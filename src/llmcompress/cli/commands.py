"""All commands, gathered: one per method, and those that run, plan and export."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcompress.cli import (
    checks,
    console,
    data,
    evaluation,
    fit,
    gguf,
    imatrix,
    kernels,
    lora,
    page,
    presets,
    recipes,
    statistics,
    structured,
    sweep,
)
from llmcompress.cli import options as o
from llmcompress.cli.jobs import Job
from llmcompress.cli.log import log
from llmcompress.cli.plan_table import show_plans
from llmcompress.cli.running import carry_out, judge_strict, refuse_unknown_kinds, strict_gates, tell
from llmcompress.cli.stopping import Stop
from llmcompress.engine.process.ranks import joined, leads, refuse_several
from llmcompress.methods.base import Method
from llmcompress.pruners.base import Pruner
from llmcompress.recipe import Calibration, Output, Recipe, build, methods, pruners

if TYPE_CHECKING:
    from llmcompress.engine.plan.plan import Plan


def register(app: typer.Typer) -> list[str]:
    """Add every command to `app`; the names of those that compress."""
    plan = typer.Typer(
        no_args_is_help=True, help="Print what a run would do: every matrix, exact size, memory, disk, passes."
    )
    steps: dict[str, type[Method] | type[Pruner]] = {**methods(), **pruners()}
    for name, step in steps.items():
        given = {"model": (o.Model, ...), **o.field_options(step), **o.RUN_OPTIONS, **o.MEANS}
        if issubclass(step, Pruner):
            given["format_"] = (o.Format, "dense")
        doc = f"{step.summary}\n\n{step.__doc__ or ''}"
        app.command(name, rich_help_panel="Compress")(o.command(_step(step), given, name, doc))
        plan.command(name)(o.command(_step(step, dry=True), given, name, f"Plan {name} without computing anything."))
    for parent, dry in ((app, False), (plan, True)):
        go = gguf.command(partial(_go, dry=dry))
        parent.command("gguf", rich_help_panel=None if dry else "Compress")(
            o.command(go, gguf.OPTIONS, "gguf", gguf.DOC)
        )
        for preset in presets.PRESETS:
            made = presets.command(preset, partial(_go, dry=dry))
            parent.command(preset.name, rich_help_panel=None if dry else "Compress")(
                o.command(made, preset.options, preset.name, preset.doc)
            )
    given = {
        "recipe": (RecipeFile, ...),
        "model": (o.Model, ...),
        "out": o.RUN_OPTIONS["out"],
        "overwrite": o.RUN_OPTIONS["overwrite"],
    }
    given |= {"format_": (o.FormatOverride, None), **o.MEANS}
    app.command("run", rich_help_panel="Compress")(
        o.command(_recipe(False), given, "run", "Run a recipe file on a model.")
    )
    plan.command("run")(o.command(_recipe(True), given, "run", "Plan a recipe file without computing anything."))
    app.command("export", rich_help_panel="Compress")(export)
    fit.register(app)
    app.add_typer(plan, name="plan", rich_help_panel="Compress")
    evaluation.register(app)
    kernels.register(app)
    checks.register(app)
    data.register(app)
    imatrix.register(app)
    structured.register(app)
    lora.register(app)
    page.register(app)
    statistics.register(app)
    recipes.register(app)
    sweep.register(app)
    return [*steps, "gguf", *(preset.name for preset in presets.PRESETS), "run"]


RecipeFile = Annotated[
    str,
    typer.Argument(
        help="Recipe as YAML, such as an output's llmcompress.yaml, or the name of one: `llmcompress recipe list`.",
        show_default=False,
    ),
]


def _step(step: type[Method] | type[Pruner], dry: bool = False) -> Callable[..., None]:
    def go(**values: Any) -> None:
        options = {name: values[name] for name in step.model_fields if name not in ("set", "gguf")}
        options["set"] = o.parse_set(values["set"])
        recipe = Recipe(
            calibration=build(Calibration, o.calibration(values), "the calibration options"),
            steps=(build(step, options, step.name),),
            output=build(Output, o.output(values), "the output options"),
            kv_cache=o.kv_cache(values),
        )
        _go(Job(recipe, values), dry=dry)

    return go


def _recipe(dry: bool) -> Callable[..., None]:
    def go(**values: Any) -> None:
        recipe = recipes.load_named(values["recipe"], values["format_"])
        _go(Job(recipe, values), dry=dry)

    return go


def _go(*jobs: Job, dry: bool = False) -> None:
    """Plan jobs, all of them before the first is carried out."""
    values = jobs[0].values
    refuse_unknown_kinds(values["strict"] or [])
    dry = dry or values["dry_run"] or values["print_recipe"]
    if dry:
        refuse_several("a plan")
    if values["print_recipe"] and not values["repair"]:
        _print_recipes([job.recipe for job in jobs], values["json_"])
        return
    stop = Stop(values["deadline"]) if jobs[0].stop is None and not dry else jobs[0].stop
    with joined(values["device"]):
        plans = _agreed(jobs, dry)
        if values["print_recipe"]:
            _print_recipes([plan.recipe for plan, _ in plans], values["json_"])
        elif dry or stop is None:
            show_plans([plan for plan, _ in plans], values["json_"])
        else:
            _carry_out(plans, values, stop)


def _print_recipes(recipes: Sequence[Recipe], as_json: bool) -> None:
    if as_json:
        found = [recipe.as_data() for recipe in recipes]
        console.print_json(found[0] if len(found) == 1 else found)
    else:
        typer.echo("---\n".join(recipe.as_yaml() for recipe in recipes), nl=False)


def _agreed(jobs: Sequence[Job], dry: bool) -> "list[tuple[Plan, dict[str, Any] | None]]":
    """Plans of jobs, by every process for itself: none goes on where one cannot."""
    from llmcompress.processes import agreed

    return agreed(lambda: [_planned(job, len(jobs) > 1 and not dry) for job in jobs])


def _planned(job: Job, several: bool) -> "tuple[Plan, dict[str, Any] | None]":
    """The plan of a job; of `several`, with the report of what an earlier start has finished."""
    from llmcompress.engine.plan.make_plan import make_plan

    if several:
        from llmcompress.engine.write.finished_runs import planned_or_finished

        plan, report = planned_or_finished(job.recipe, job.values["model"], o.run_options(job.values))
    else:
        plan, report = make_plan(job.recipe, job.values["model"], o.run_options(job.values)), None
    plan.ledger.extend(job.notes)
    return plan, report


def _carry_out(plans: "Sequence[tuple[Plan, dict[str, Any] | None]]", values: dict[str, Any], stop: Stop) -> None:
    from transformers.utils import logging

    from llmcompress.engine.write.timings import refuse_place

    logging.disable_progress_bar()
    for plan, _ in plans if values["timings"] is not None else ():
        refuse_place(values["timings"], plan)
    gates, results = values["gates"], {}
    strict = strict_gates(values["strict"] or [], [plan.out for plan, _ in plans])
    gates.expect(name for _, _, name in strict)
    quiet = values["quiet"] or (values["json_"] and not log.active) or not leads()
    for plan, report in plans:
        results[plan.out] = carry_out(plan, stop, quiet, report, timings=values["timings"] if leads() else None)
        stop.before += report is None
        if leads() and (log.active or not values["json_"]):
            tell(plan, results[plan.out], values["quiet"])
    if not leads():
        return
    if values["json_"]:
        found = list(results.values())
        console.print_json(found[0] if len(found) == 1 else found)
    broken = [judge_strict(results[out], kind, name, gates) for out, kind, name in strict]
    for error in filter(None, broken):
        raise error


def export(
    work: Annotated[Path, typer.Argument(help="Work directory kept by --keep-work.", show_default=False)],
    formats: Annotated[list[str], typer.Option("--format", help="Format to write. Repeatable.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory to write; with several formats their names are appended."),
    ] = None,
    overwrite: o.Overwrite = False,
    json_: o.Json = False,
    log_format: o.LogFormat = "text",
) -> None:
    """Write other formats from a finished run's work directory, without computing anything again."""
    from llmcompress.engine.write.export_work import export_work

    done = export_work(work, formats, out, overwrite)
    if json_:
        console.print_json([{"format": name, "output": str(path), "bytes": size} for name, path, size in done])
        return
    for name, path, size in done:
        console.say(f"{path}: {name}, {console.size(size)}")
