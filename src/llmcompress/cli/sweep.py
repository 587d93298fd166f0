"""`sweep`: several runs from one calibration, one table at the end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcompress.api.quiet import quiet_libraries
from llmcompress.api.recipes import as_recipe
from llmcompress.api.results import refuse_unknown_kinds
from llmcompress.api.steps import watched
from llmcompress.cli import console, watching
from llmcompress.cli import options as flags
from llmcompress.cli.gates import GateCase, Gates
from llmcompress.cli.log import log
from llmcompress.cli.plan_table import show_plans
from llmcompress.cli.running import Strict, carry_out, tell
from llmcompress.cli.stopping import Stop
from llmcompress.cli.sweep_recipes import Variant, listed, variants
from llmcompress.cli.sweep_table import Run, show_runs
from llmcompress.errors import GateError, LlmcompressError, RecipeError, RunError, StoppedError

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.engine.plan.plan import Plan
    from llmcompress.validate.request import Request

DOC = """Run a recipe with several methods, bits or group sizes, from one calibration, and compare them in a table.

Each run is an ordinary output in a directory of its own. What an earlier start has finished is not done again, and \
the run that was under way goes on. A run that fails does not stop the others."""

_ROOM = "Sweep"
_LENGTH = 512  # tokens per window of what is evaluated
_AGAIN = "run the same command again to go on; finished runs and layers are kept"
_NAMES = ("work", "print_recipe", "adapter")  # of options that are for a single run

RecipeName = Annotated[
    str, typer.Argument(help="Recipe as YAML, or a name of `llmcompress recipe list`.", show_default=False)
]
Methods = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="Methods or presets, such as gptq,awq. Default: the recipe's.",
        rich_help_panel=_ROOM,
    ),
]
Bits = Annotated[
    str | None, typer.Option("--bits", help="Bits, such as 3,4,5. Default: the recipe's.", rich_help_panel=_ROOM)
]
GroupSizes = Annotated[
    str | None,
    typer.Option(
        "--group-size", help="Group sizes, such as 32,128; -1: one scale per row. Default: the recipe's.",
        rich_help_panel=_ROOM,
    ),
]  # fmt: skip
Out = Annotated[
    Path,
    typer.Option(
        "--output", "-o", help="Directory to write all outputs to.", show_default=False, rich_help_panel=flags.OUTPUT
    ),
]
Evaluate = Annotated[
    str | None,
    typer.Option(
        "--evaluate",
        help="Measure perplexity and KL divergence from the original on this text, or 'default'.",
        rich_help_panel=_ROOM,
    ),
]
EvalLength = Annotated[
    int | None,
    typer.Option(
        "--eval-length",
        min=2,
        max=1 << 24,
        help="Tokens per window of --evaluate. Default: 512.",
        rich_help_panel=_ROOM,
    ),
]
EvalWindows = Annotated[
    int | None,
    typer.Option("--eval-windows", min=1, max=1_000_000, help="Windows of --evaluate.", rich_help_panel=_ROOM),
]
RefCache = Annotated[
    Path | None,
    typer.Option(
        "--ref-cache",
        help="Folder in which what the original's layers give for the text of --evaluate is kept: they run once.",
        rich_help_panel=_ROOM,
    ),
]
OPTIONS: dict[str, tuple[Any, Any]] = {
    "recipe": (RecipeName, ...),
    "model": (flags.Model, ...),
    "out": (Out, ...),
    "methods": (Methods, None),
    "bits": (Bits, None),
    "group_size": (GroupSizes, None),
    "evaluate": (Evaluate, None),
    "eval_length": (EvalLength, None),
    "eval_windows": (EvalWindows, None),
    "ref_cache": (RefCache, None),
    "format_": (flags.FormatOverride, None),
    "overwrite": (flags.Overwrite, False),
    **flags.OTHER_TEXT,
    **{name: option for name, option in flags.RESOURCE_OPTIONS.items() if name not in _NAMES},
}


def register(app: typer.Typer) -> None:
    app.command("sweep", rich_help_panel="Compress")(flags.command(sweep, OPTIONS, "sweep", DOC))


def sweep(**values: Any) -> None:
    """Plan all runs, carry them out, and compare them."""
    with watching.reading(values["quiet"] or values["json_"]):
        from llmcompress.engine.run.start import refuse_start
        from llmcompress.engine.write.timings import refuse_place
        from llmcompress.store.unfinished import claimed
        from llmcompress.validate.reference_cache import refuse_cache

    refuse_unknown_kinds(values["strict"] or [])
    for name in ("ref_cache", "eval_length", "eval_windows"):
        if values["evaluate"] is None and values[name] is not None:
            option = f"--{name.replace('_', '-')}"
            raise RecipeError(f"{option} is for what is evaluated", "give a text as --evaluate, or 'default'")
    if values["ref_cache"] is not None:
        refuse_cache(values["ref_cache"], compared=True)
    wanted = variants(
        as_recipe(values["recipe"], None, flags.changed_settings(values)),
        listed("--method", values["methods"], str),
        listed("--bits", values["bits"], int),
        listed("--group-size", values["group_size"], int),
    )
    if values["evaluate"] is not None:
        from llmcompress.validate.session import windows_of

        windows_of(_evaluated(values["model"], values))  # refuses a text that is not there, or too short
    stop = Stop(values["deadline"])
    plans = [_planned(variant, values, overwrite=True) for variant in wanted]
    for plan in plans if values["timings"] is not None else ():
        refuse_place(values["timings"], plan)
    for variant, plan in zip(wanted, plans, strict=True):
        with _named(variant), quiet_libraries():
            refuse_start(plan)
    if values["dry_run"]:
        show_plans(plans, values["json_"])
        return
    with claimed(values["out"]):
        _carried_out(wanted, plans, values, stop)


def _carried_out(wanted: Sequence[Variant], plans: "Sequence[Plan]", values: dict[str, Any], stop: Stop) -> None:
    """Carry the plans out in the directory that this sweep has claimed, and compare them."""
    tokens = _tokens(plans, values["out"])
    runs = [_run_of(variant, plan, values, tokens) for variant, plan in zip(wanted, plans, strict=True)]
    gates: Gates = values["gates"]
    gates.expect(run.variant.name for run in runs)
    strict = Strict(values["strict"] or [], [run.plan.out for run in runs], gates)
    stopped = _all(runs, values, stop, tokens, strict)
    show_runs(runs, values["model"], values["json_"], measured=values["evaluate"] is not None)
    failed = [run for run in runs if run.state == "failed"]
    if stopped is not None:
        raise stopped
    if failed:
        kind = GateError if all(run.gated for run in failed) else RunError
        raise kind(f"{len(failed)} of {len(runs)} runs failed, first {failed[0].variant.name}: {failed[0].error}")


def _planned(variant: Variant, values: dict[str, Any], overwrite: bool) -> "Plan":
    from llmcompress.engine.plan.make_plan import make_plan

    given = {**values, "out": values["out"] / variant.name, "work": None, "overwrite": overwrite}
    with _named(variant):
        return make_plan(variant.recipe, values["model"], flags.run_options(given))


@contextmanager
def _named(variant: Variant) -> Iterator[None]:
    """A context in which errors say which of the runs they are about."""
    try:
        yield
    except LlmcompressError as error:
        raise type(error)(f"{variant.name}: {error.message}", error.hint) from None


def _tokens(plans: "Sequence[Plan]", folder: Path) -> "Tensor | None":
    """The calibration that all runs share; None if none of them is calibrated."""
    from llmcompress.engine.run.sweep_tokens import tokens_of_sweep

    calibrated = next((plan for plan in plans if plan.calibrated), None)
    return None if calibrated is None else tokens_of_sweep(calibrated, folder)


def _run_of(variant: Variant, plan: "Plan", values: dict[str, Any], tokens: "Tensor | None") -> Run:
    """A run to be carried out, or one that an earlier start has finished."""
    from llmcompress.engine.write.finished_runs import finished_report

    report = finished_report(plan, tokens)
    return Run(variant, plan if report is not None else _planned(variant, values, values["overwrite"]), report)


def _all(
    runs: Sequence[Run], values: dict[str, Any], stop: Stop, tokens: "Tensor | None", strict: Strict
) -> StoppedError | None:
    """Carry runs out, whatever becomes of the others; the error that stopped them, if one did."""
    gates = strict.gates
    for number, run in enumerate(runs, 1):
        name = run.variant.name
        try:
            if stop(0):
                raise StoppedError(f"stopped before {name}", _AGAIN)
            log.event("run", name=name, number=number, of=len(runs))
            _one(run, values, stop, tokens, strict)
        except StoppedError as error:
            run.state = "stopped"
            gates.add(GateCase(name, "skipped", error.message))
            return error
        except (LlmcompressError, MemoryError, OSError, RuntimeError) as error:
            run.state = "failed"
            run.error = error.message if isinstance(error, LlmcompressError) else f"{type(error).__name__}: {error}"
            run.gated = isinstance(error, GateError)
            gates.add(GateCase(name, "failed" if run.gated else "error", run.error))
            console.say(f"{name} failed: {run.error}")
        else:
            run.state = "done"
            gates.add(GateCase(name, "passed"))
    return None


def _one(run: Run, values: dict[str, Any], stop: Stop, tokens: "Tensor | None", strict: Strict) -> None:
    """Carry one run out, and measure it. GateError for a ledger that is not allowed, or figures that are not finite."""
    from llmcompress.workers import SERIAL

    quiet = values["quiet"] or (values["json_"] and not log.active)
    text = tokens if run.plan.calibrated else None
    run.result = carry_out(run.plan, stop, quiet, run.report, SERIAL, strict, text, values["timings"])
    stop.before += run.report is None
    if log.active or not values["json_"]:
        tell(run.plan, run.result, values["quiet"])
    if values["evaluate"] is None:
        return
    from llmcompress.validate.evaluation_cache import cached_figures
    from llmcompress.validate.token_statistics import refuse_not_finite

    request = _evaluated(run.plan.out, values)
    # figures are kept once all are there: the deadline waits for them, unless this start has got somewhere already
    with quiet_libraries(), watching.Steps(f"evaluating {run.variant.name}", quiet) as steps:
        watch = watched(steps.at, lambda done: stop(0), _AGAIN)
        run.figures = cached_figures(request, values["out"] / f"{run.variant.name}.eval.json", watch)
    refuse_not_finite(run.figures)


def _evaluated(out: Path, values: dict[str, Any]) -> "Request":
    """The evaluation of an output beside the model."""
    from llmcompress.validate.request import Request

    return Request(
        out,
        values["model"],
        values["evaluate"],
        values["eval_length"] or _LENGTH,
        values["eval_windows"],
        batch=4,
        device=values["device"],
        dtype="float32",
        trust_remote_code=values["trust_remote_code"],
        ref_cache=values["ref_cache"],
    )
