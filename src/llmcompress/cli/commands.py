"""All commands, gathered: one per method, and those that run, plan and export."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from llmcompress.api import compression
from llmcompress.api.presets import PRESETS
from llmcompress.api.recipes import as_recipe
from llmcompress.cli import (
    checks,
    comparing,
    console,
    data,
    draft,
    evaluation,
    fit,
    gguf,
    imatrix,
    kernels,
    lora,
    page,
    presets,
    recipes,
    recover,
    sized,
    statistics,
    structured,
    sweep,
)
from llmcompress.cli import options as flags
from llmcompress.cli.jobs import Execution, Job
from llmcompress.cli.running import start
from llmcompress.ledger import as_json
from llmcompress.methods.base import Method
from llmcompress.pruners.base import Pruner
from llmcompress.recipe import methods, pruners


def register(app: typer.Typer) -> list[str]:
    """Add every command to `app`; the names of those that compress."""
    plan = typer.Typer(
        no_args_is_help=True, help="Print what a run would do: every matrix, exact size, memory, disk, passes."
    )
    steps: dict[str, type[Method] | type[Pruner]] = {**methods(), **pruners()}
    for name, step in steps.items():
        given = {
            "model": (flags.Model, ...),
            **flags.field_options(step),
            **flags.RUN_OPTIONS,
            **flags.RESOURCE_OPTIONS,
        }
        if issubclass(step, Pruner):
            given["format_"] = (flags.Format, "dense")
        if name in sized.METHODS:
            given |= sized.OPTIONS
        doc = f"{step.summary}\n\n{step.__doc__ or ''}"
        app.command(name, rich_help_panel="Compress")(flags.command(_step(name), given, name, doc))
        plan.command(name)(
            flags.command(_step(name, dry=True), given, name, f"Plan {name} without computing anything.")
        )
    for parent, dry in ((app, False), (plan, True)):
        panel = None if dry else "Compress"
        parent.command("gguf", rich_help_panel=panel)(flags.command(gguf.command(dry), gguf.OPTIONS, "gguf", gguf.DOC))
        for preset in PRESETS.values():
            parent.command(preset.name, rich_help_panel=panel)(
                flags.command(_step(preset.name, dry), presets.options(preset), preset.name, preset.doc)
            )
    given = {
        "recipe": (RecipeFile, ...),
        "model": (flags.Model, ...),
        "out": flags.RUN_OPTIONS["out"],
        **flags.taken("overwrite", "base_model", "license"),
    }
    given |= {"format_": (flags.FormatOverride, None), **flags.OTHER_TEXT, **flags.RESOURCE_OPTIONS}
    app.command("run", rich_help_panel="Compress")(
        flags.command(_recipe(False), given, "run", "Run a recipe file on a model.")
    )
    plan.command("run")(flags.command(_recipe(True), given, "run", "Plan a recipe file without computing anything."))
    app.command("export", rich_help_panel="Compress")(export)
    fit.register(app)
    app.add_typer(plan, name="plan", rich_help_panel="Compress")
    evaluation.register(app)
    comparing.register(app)
    kernels.register(app)
    checks.register(app)
    data.register(app)
    imatrix.register(app)
    structured.register(app)
    lora.register(app)
    recover.register(app)
    draft.register(app)
    page.register(app)
    statistics.register(app)
    recipes.register(app)
    sweep.register(app)
    return [*steps, "gguf", *PRESETS, "run"]


RecipeFile = Annotated[
    str,
    typer.Argument(
        help="Recipe as YAML, such as an output's llmcompress.yaml, or the name of one: `llmcompress recipe list`.",
        show_default=False,
    ),
]


def _step(name: str, dry: bool = False) -> Callable[..., None]:
    def run(**values: Any) -> None:
        if name in sized.METHODS:
            if sized.asked(values):
                sized.start_sized(name, values, dry)
                return
            values = {option: value for option, value in values.items() if option not in sized.OPTIONS}
        start(Job.of(name, values), execution=Execution.of(values), dry=dry)

    return run


def _recipe(dry: bool) -> Callable[..., None]:
    def run(**values: Any) -> None:
        recipe = as_recipe(values["recipe"], None, flags.changed_settings(values))
        start(Job.of(recipe, values), execution=Execution.of(values), dry=dry)

    return run


def export(
    work: Annotated[
        Path, typer.Argument(help="Work directory kept by --keep-work, or a quantised checkpoint.", show_default=False)
    ],
    formats: Annotated[list[str], typer.Option("--format", help="Format to write. Repeatable.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory to write; with several formats their names are appended."),
    ] = None,
    overwrite: flags.Overwrite = False,
    json_: flags.Json = False,
    log_format: flags.LogFormat = "text",
) -> None:
    """Write other formats of a finished run, or of a quantised checkpoint, without computing anything again."""
    done = compression.export(work, formats, out, overwrite=overwrite)
    if json_:
        console.print_json([{"format": item.format, "output": str(item.output), "bytes": item.nbytes} for item in done])
        return
    for item in done:
        console.say(f"{item.output}: {item.format}, {console.size(item.nbytes)}")
        console.ledger(as_json(item.engines))
    console.next_step("verify", done[-1].output)
