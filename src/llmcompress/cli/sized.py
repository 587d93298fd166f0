"""`gptq` and `rtn` within a size or a divergence: grids are chosen by what each matrix would lose, then it is run."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from llmcompress.api.fitting import GROUP_SIZES, FitResult, fitted_grids, wanted_of
from llmcompress.api.recipes import method_recipe
from llmcompress.cli import budget, watching
from llmcompress.cli import options as flags
from llmcompress.cli.jobs import Execution, Job
from llmcompress.cli.running import start
from llmcompress.cli.stopping import Stop
from llmcompress.cli.structured import tell_plan
from llmcompress.engine.process.ranks import refuse_several
from llmcompress.errors import RecipeError
from llmcompress.grids.integer import INTEGER_BITS

METHODS = ("gptq", "rtn")
OPTIONS: dict[str, tuple[Any, Any]] = {
    **budget.options("what is quantised, scales included; bits are chosen by measured loss", kept="sensitivity"),
    "kl": (budget.Kl, None),
}


def asked(values: dict[str, Any]) -> bool:
    """Whether a size or a divergence says which grids are chosen; RecipeError where other options contradict that."""
    given = [f"--{name}" for name in ("size", "bpw", "kl") if values[name] is not None]
    if not given and values["sensitivity"] is not None:
        raise RecipeError("--sensitivity is of use with --size, --bpw or --kl only", "leave it out")
    if given and values["bits"] is not None:
        raise RecipeError(
            f"{given[0]} and --bits both say how wide weights are to be",
            "leave one of them out; `llmcompress fit --bits 3,4` chooses among some widths",
        )
    if given and values["activations"] != "none":
        raise RecipeError(
            f"{given[0]} chooses among widths of weights whose inputs are not rounded",
            "leave --activations out, or give --bits instead",
        )
    return bool(given)


def start_sized(method: str, values: dict[str, Any], dry: bool) -> None:
    """Measure, choose, and carry out. dry: print the plan of what was chosen and stop.

    What is measured is kept beside the work directory until the output is written, so that a later start goes on, and
    a run with --guided goes by the same gradients.
    """
    refuse_several("choosing grids by a size")
    execution, stop = Execution.of(values), Stop(values["deadline"])
    with watching.reading(execution.quiet or execution.json):
        from llmcompress.engine.plan.paths import path_beside
        from llmcompress.engine.run.guidance import beside
        from llmcompress.store.output_file import output_of
        from llmcompress.store.statistics import remove_store
    computes = not (dry or execution.dry_run or execution.print_recipe)
    out = values["out"] or path_beside(values["model"], f"{method}-{budget.label(values)}")
    work = values["work"] or out.with_name(f"{out.name}.work")
    kept = values["sensitivity"] or (work.with_name(f"{work.name}.sensitivity.json") if computes else None)
    guidance = beside(work) if computes and values["stats"] is None else None

    def clear() -> None:
        """Delete what is kept for the run alone."""
        if values["sensitivity"] is None and kept is not None:
            kept.unlink(missing_ok=True)
        if guidance is not None:
            remove_store(guidance)

    if values["restart"]:
        clear()
    with ExitStack() as stack:
        output = output_of(out, values["format_"], values["overwrite"] or not computes)
        if computes:
            stack.enter_context(output)
        measuring = work.with_name(f"{work.name}.fit")
        found = _found(method, {**values, "sensitivity": kept, "work": measuring}, guidance, execution, stop)
        job = Job(found.recipe, values["model"], flags.run_options({**values, "out": out}), found.ledger)
        start(job, execution=execution, dry=dry, stop=stop, output=output if computes else None)
    clear()


def _found(method: str, values: dict[str, Any], guidance: Path | None, execution: Execution, stop: Stop) -> FitResult:
    group_sizes = GROUP_SIZES if values["group_size"] is None else [values["group_size"]]
    size, bpw, kl, kept = (values[name] for name in ("size", "bpw", "kl", "sensitivity"))
    with watching.reading(execution.quiet or execution.json):
        wanted = wanted_of(size, bpw, kl, kept, INTEGER_BITS, group_sizes, values["type"])
    settings = {name: value for name, value in values.items() if name not in (*OPTIONS, "bits", "group_size", "type")}
    quiet = execution.quiet or execution.json
    with watching.Steps("measuring", quiet) as steps:
        return fitted_grids(
            method_recipe(method, flags.recipe_settings(settings)),
            values["model"],
            wanted,
            values["work"],
            flags.run_options(values),
            steps.at,
            stop,
            lambda memory: tell_plan({"memory_bytes": memory}, quiet),
            guidance,
        )
