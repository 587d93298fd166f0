"""All commands, gathered: one per method, and those that run, plan and export."""

import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcompress.cli import checks, console, data, evaluation, fit, gguf, imatrix, presets
from llmcompress.cli import options as o
from llmcompress.cli.jobs import Job
from llmcompress.cli.shown import show_plans
from llmcompress.errors import GateError, RecipeError
from llmcompress.ledger import KINDS
from llmcompress.methods.base import Method
from llmcompress.pruners.base import Pruner
from llmcompress.recipe import Calibration, Output, Recipe, build, load, methods, pruners
from llmcompress.registry import suggest

if TYPE_CHECKING:
    from llmcompress.engine.plan import Plan


def register(app: typer.Typer) -> None:
    """Add every command to `app`."""
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
    given |= {"format_": (FormatOverride, None), **o.MEANS}
    app.command("run", rich_help_panel="Compress")(
        o.command(_recipe(False), given, "run", "Run a recipe file on a model.")
    )
    plan.command("run")(o.command(_recipe(True), given, "run", "Plan a recipe file without computing anything."))
    app.command("export", rich_help_panel="Compress")(export)
    fit.register(app)
    app.add_typer(plan, name="plan", rich_help_panel="Compress")
    evaluation.register(app)
    checks.register(app)
    data.register(app)
    imatrix.register(app)


RecipeFile = Annotated[
    Path,
    typer.Argument(
        help="Recipe as YAML, such as those in configs/ or an output's llmcompress.yaml.", show_default=False
    ),
]
FormatOverride = Annotated[
    str | None, typer.Option("--format", help="Another format than the recipe's.", rich_help_panel=o.OUTPUT)
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
        recipe = load(values["recipe"])
        if values["format_"] is not None:
            recipe = recipe.model_copy(
                update={"output": recipe.output.model_copy(update={"format": values["format_"]})}
            )
        _go(Job(recipe, values), dry=dry)

    return go


def _go(*jobs: Job, dry: bool = False) -> None:
    """Plan jobs, all of them before the first is carried out."""
    values = jobs[0].values
    for kind in values["strict"] or []:
        if kind not in (*KINDS, "any"):
            raise RecipeError(f"--strict {kind!r} is not a kind of ledger entry", suggest(kind, [*KINDS, "any"]))
    if values["print_recipe"] and not values["repair"]:
        _print_recipes([job.recipe for job in jobs])
        return
    plans = [_planned(job) for job in jobs]
    if values["print_recipe"]:
        _print_recipes([plan.recipe for plan in plans])
    elif dry or values["dry_run"]:
        show_plans(plans, values["json_"])
    else:
        _carry_out(plans, values)


def _print_recipes(recipes: Sequence[Recipe]) -> None:
    typer.echo("---\n".join(recipe.as_yaml() for recipe in recipes), nl=False)


def _planned(job: Job) -> "Plan":
    from llmcompress.engine.plan import make_plan

    plan = make_plan(job.recipe, job.values["model"], o.means(job.values))
    plan.ledger.extend(job.notes)
    return plan


def _carry_out(plans: Sequence["Plan"], values: dict[str, Any]) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    stop = _stop_request(values["deadline"])
    results = []
    for plan in plans:
        result = _result(plan, stop, quiet=values["quiet"] or values["json_"])
        results.append(result)
        if not values["json_"]:
            _tell(plan, result, values["quiet"])
    if values["json_"]:
        console.print_json(results[0] if len(results) == 1 else results)
    for result in results:
        _refuse_broken(result, values["strict"] or [])


def _result(plan: "Plan", stop: Callable[[int], bool], quiet: bool) -> dict[str, Any]:
    from llmcompress.engine.resources import peak_memory
    from llmcompress.engine.run import run

    begin = time.perf_counter()
    with console.Watching(quiet=quiet) as watch:
        result = run(plan, watch, stop)
    seconds = round(time.perf_counter() - begin, 2)
    return {**result, "output": str(plan.out), "seconds": seconds, "peak_memory_bytes": peak_memory()}


def _tell(plan: "Plan", result: dict[str, Any], quiet: bool) -> None:
    if not quiet:
        console.ledger(result["ledger"])
    cost = plan.estimate
    written = f"{console.size(cost.output_bytes)}, {cost.output_bytes / cost.source_bytes:.0%} of the source"
    spent = f"{result['seconds']:.1f} s, peak memory {console.size(result['peak_memory_bytes'])}"
    console.say(f"{plan.out}: {written}, {cost.bits_per_weight:.2f} bits per weight; {spent}")


def _refuse_broken(result: dict[str, Any], wanted: Sequence[str]) -> None:
    """GateError for ledger entries that --strict does not allow."""
    broken = [entry for entry in result["ledger"] if "any" in wanted or entry["kind"] in wanted]
    if broken:
        first = broken[0]
        raise GateError(
            f"--strict: {len(broken)} ledger entries, first {first['kind']}: {first['subject']}: {first['why']}",
            f"the output was written to {result['output']}; see its report.json",
        )


def _stop_request(deadline: float | None) -> Callable[[int], bool]:
    """True once SIGTERM has come, or the deadline is over and a section finished: so every start gets further."""
    asked = {"stop": False}
    begin = time.monotonic()

    def on_term(_: int, __: FrameType | None) -> None:
        asked["stop"] = True

    signal.signal(signal.SIGTERM, on_term)

    def stop(finished: int) -> bool:
        late = deadline is not None and time.monotonic() - begin >= deadline
        return asked["stop"] or (late and finished > 0)

    return stop


def export(
    work: Annotated[Path, typer.Argument(help="Work directory kept by --keep-work.", show_default=False)],
    formats: Annotated[list[str], typer.Option("--format", help="Format to write. Repeatable.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory to write; with several formats their names are appended."),
    ] = None,
    overwrite: o.Overwrite = False,
    json_: o.Json = False,
) -> None:
    """Write other formats from a finished run's work directory, without computing anything again."""
    from llmcompress.engine.export import export_work

    done = export_work(work, formats, out, overwrite)
    if json_:
        console.print_json([{"format": name, "output": str(path), "bytes": size} for name, path, size in done])
        return
    for name, path, size in done:
        console.say(f"{path}: {name}, {console.size(size)}")
