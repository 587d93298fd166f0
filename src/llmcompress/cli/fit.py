"""`fit`: a recipe that gives every matrix the bits it needs, within a size."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from llmcompress.api.fitting import GROUP_SIZES, FitResult, fitted_grids, wanted_of
from llmcompress.api.recipes import method_recipe
from llmcompress.api.settings import TEXT_SETTINGS
from llmcompress.cli import budget, console, watching
from llmcompress.cli import options as flags
from llmcompress.cli.log import log
from llmcompress.cli.stopping import Stop
from llmcompress.cli.structured import tell_plan
from llmcompress.grids.integer import INTEGER_BITS
from llmcompress.recipe import DEFAULT_FORMAT, Recipe, methods

DOC = """Find the grid of every matrix by which a model loses least within a size, as a recipe for `run`.

What each matrix would lose on each grid is measured on text: by gradients of what the model predicts, and by rounding \
a part of its weights. The recipe carries the KL divergence, the bits and the bytes that are expected of it; \
`llmcompress eval` of the result shows them beside what it measures. \
For types of GGUF see `llmcompress gguf --bpw` and `--kl`."""

Out = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Recipe to write. Default: print it.", rich_help_panel=flags.OUTPUT),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the recipe that is there.", rich_help_panel=flags.OUTPUT)
]
MethodName = Annotated[
    Literal["gptq", "rtn"], typer.Option("--method", help="How weights are rounded, for which errors are measured.")
]
Types = Annotated[
    str,
    typer.Option(
        "--type",
        metavar="GRIDS",
        help="Types to choose from, such as nvfp4,fp8, as far as format and target take them; "
        "see `llmcompress gptq --help`.",
    ),
]
Bits = Annotated[str, typer.Option("--bits", help="Widths to choose from, for types that have several.")]
GroupSizes = Annotated[
    str,
    typer.Option(
        "--group-size",
        help="Input channels per scale to choose from, for types that leave it open, as far as they divide a width; "
        "-1: whole rows.",
    ),
]
Work = Annotated[
    Path | None,
    typer.Option(
        "--work",
        help="Work directory while measuring, with which the next start goes on. Default: RECIPE.work.",
        rich_help_panel=flags.RUNNING,
    ),
]
Patterns = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATTERN: {OPTION: VALUE}",
        help="Other options for modules matching a pattern; the bits and group sizes it names stay. Repeatable.",
    ),
]

OPTIONS: dict[str, tuple[Any, Any]] = {
    "model": (flags.Model, ...),
    **budget.options("what is quantised, scales included", kept="sensitivity"),
    "kl": (budget.Kl, None),
    "method": (MethodName, "gptq"),
    "type_": (Types, "int"),
    "bits": (Bits, ",".join(map(str, INTEGER_BITS))),
    "group_size": (GroupSizes, ",".join(map(str, GROUP_SIZES))),
    "sym": (flags.field_options(methods()["gptq"])["sym"][0], True),
    "set": (Patterns, None),
    "out": (Out, None),
    "overwrite": (Overwrite, False),
    "format_": (flags.Format, DEFAULT_FORMAT),
    **flags.taken("shard_size", "base_model", "license", "calibration", "field", "samples", "length", "seed"),
    **flags.taken("adapter", "target", "tp", "gpu", "device", "threads", "max_memory"),
    "work": (Work, None),
    **flags.taken("restart", "deadline", "trust_remote_code", "json_", "junit", "log_format", "quiet"),
}


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("fit", rich_help_panel="Compress")(flags.command(fit, OPTIONS, "fit", DOC))


def fit(**values: Any) -> None:
    """Measure, choose, write, tell."""
    from llmcompress.store.unfinished import claimed, put_in_place

    with watching.reading(values["quiet"] or values["json_"]):
        names = ("size", "bpw", "kl", "sensitivity", "bits", "group_size", "type_")
        wanted, recipe, out = wanted_of(*(values[name] for name in names)), recipe_of(values), values["out"]
    _refuse_place(out, values["overwrite"])
    quiet = values["quiet"] or (values["json_"] and not log.active)
    with ExitStack() as stack:
        if out is not None:
            claim = stack.enter_context(claimed(out))
        with watching.Steps("measuring", quiet) as steps:
            found = fitted_grids(
                recipe,
                values["model"],
                wanted,
                _work(values),
                flags.run_options(values),
                steps.at,
                Stop(values["deadline"]),
                lambda memory: tell_plan({"memory_bytes": memory}, quiet),
            )
        if out is not None:
            put_in_place(claim, out, found.recipe.as_yaml().encode())
    _tell(found, values)


def _work(values: dict[str, Any]) -> Path:
    """Where layers that are measured are kept until all are."""
    if values["work"] is not None:
        return Path(values["work"])
    beside = values["out"] or values["sensitivity"]
    return Path("fit.work") if beside is None else beside.with_name(f"{beside.name}.work")


def recipe_of(values: dict[str, Any]) -> Recipe:
    """What the options say, but for the bits."""
    names = ("sym", "set", "format_", "shard_size", "base_model", "license", *TEXT_SETTINGS)
    return method_recipe(values["method"], flags.recipe_settings({name: values[name] for name in names}))


def _refuse_place(out: Path | None, overwrite: bool) -> None:
    from llmcompress.errors import PlanError
    from llmcompress.store.unfinished import refuse_unclaimable

    if out is None:
        return
    if out.exists() and not (overwrite and out.is_file()):
        hint = "give another file, or --overwrite" if out.is_file() else "give the name of a file"
        raise PlanError(f"{out} already exists", hint)
    refuse_unclaimable(out)


def _tell(found: FitResult, values: dict[str, Any]) -> None:
    from llmcompress.engine.process.process_memory import peak_memory

    expected = found.recipe.expected
    assert expected is not None
    if values["json_"]:
        console.print_json(
            {
                "recipe": found.recipe.as_data(),
                "output": None if values["out"] is None else str(values["out"]),
                "expected": expected.model_dump(),
                "matrices": [{"names": names, "grid": grid, "kl": loss} for names, grid, loss in found.losses],
                "ledger": [asdict(entry) for entry in found.ledger],
                "peak_memory_bytes": peak_memory(),
            }
        )
        return
    if values["out"] is None:
        typer.echo(found.recipe.as_yaml(), nl=False)
    where = "recipe" if values["out"] is None else values["out"]
    console.say(
        f"{where}: expects a KL divergence of {expected.kl:.4g} nats per token, "
        f"{expected.bits_per_quantised_weight:.3f} bits per quantised weight; "
        f"weight files of {expected.output_bytes:,} bytes exactly"
    )
    if values["out"] is not None:
        console.next_step("run", values["out"], values["model"])
