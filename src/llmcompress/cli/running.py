"""Carry jobs out for the command line: print their plans or recipes, or run them, and tell what came of them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmcompress.api import compression
from llmcompress.api.results import Result, noted, noted_error, refuse_unknown_kinds, timed
from llmcompress.cli import console, watching
from llmcompress.cli.gates import Gates
from llmcompress.cli.jobs import Execution, Job
from llmcompress.cli.log import log
from llmcompress.cli.plan_table import show_plans
from llmcompress.cli.stopping import Stop
from llmcompress.engine.process.ranks import joined, leads, refuse_several
from llmcompress.errors import ExistsError, GateError
from llmcompress.ledger import LedgerEntry, as_json
from llmcompress.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.engine.plan.plan import Plan
    from llmcompress.engine.plan.run_options import Options
    from llmcompress.store.output import OutputDirectory
    from llmcompress.workers import Workers

    Planned = tuple[Plan, dict[str, Any] | None]
    """A plan, and the report of its output if an earlier start has finished it."""


def start(
    *jobs: Job,
    execution: Execution,
    dry: bool = False,
    stop: Stop | None = None,
    output: "OutputDirectory | None" = None,
) -> None:
    """Plan all jobs, then carry them out one after another. dry: print the plans and stop.

    stop, output: of a command that has worked before its only plan, so that the clock of its deadline runs already, and
    the output is claimed.
    """
    refuse_unknown_kinds(execution.strict)
    options = jobs[0].options
    dry = dry or execution.dry_run or execution.print_recipe
    if dry:
        refuse_several("a plan")
    if execution.print_recipe and not options.repair:
        _print_recipes([job.recipe for job in jobs], execution.json)
        return
    if stop is None and not dry:
        stop = Stop(execution.deadline)
    with ExitStack() as stack:
        with watching.reading(execution.quiet or execution.json or not leads()):
            workers = stack.enter_context(joined(options.device))
            planned = workers.all_or_raise(
                lambda: _still_made([_planned(job, len(jobs) > 1, dry) for job in jobs], options)
            )
        if execution.timings is not None:
            from llmcompress.engine.write.timings import refuse_place

            for plan, _ in planned:
                refuse_place(execution.timings, plan)
        if execution.print_recipe:
            _print_recipes([plan.recipe for plan, _ in planned], execution.json)
        elif dry or stop is None:
            show_plans([plan for plan, _ in planned], execution.json)
        else:
            _run_all(planned, execution, stop, workers, output)


def _print_recipes(recipes: Sequence[Recipe], as_json: bool) -> None:
    if as_json:
        found = [recipe.as_data() for recipe in recipes]
        console.print_json(found[0] if len(found) == 1 else found)
    else:
        typer.echo("---\n".join(recipe.as_yaml() for recipe in recipes), nl=False)


def _planned(job: Job, several: bool, dry: bool) -> "Planned":
    """The plan of a job; of `several`, with the report of what an earlier start has finished.

    dry: nothing is run, so that the plan itself has to refuse what a run would refuse.
    """
    if dry:
        return _plan_beside(job).with_notes(job.notes), None
    from llmcompress.engine.plan.make_plan import make_plan
    from llmcompress.engine.write.finished_runs import planned_or_finished

    if not several:
        return make_plan(job.recipe, job.model, job.options).with_notes(job.notes), None
    plan, report = planned_or_finished(job.recipe, job.model, job.options)
    return plan.with_notes(job.notes), report


def _still_made(planned: "list[Planned]", options: "Options") -> "list[Planned]":
    """Plans, without the reports of outputs that `--overwrite` makes anew.

    Plans are carried out in order, so where a start was stopped, the work directory under way lies behind those outputs
    that this start has made anew; without one nothing was stopped, and all of them are from before.
    """
    if not options.overwrite:
        return planned
    works = [plan.work.exists() and not options.restart for plan, _ in planned]
    under_way = max((place for place, there in enumerate(works) if there), default=0)
    return [
        (plan, report if place < under_way and not works[place] else None)
        for place, (plan, report) in enumerate(planned)
    ]


def _plan_beside(job: Job) -> "Plan":
    """The plan of a job, with a note where its output exists, which only the run refuses."""
    try:
        return compression.plan(job.model, job.recipe, options=job.options)
    except ExistsError as error:
        plan = compression.plan(job.model, job.recipe, options=replace(job.options, overwrite=True))
        return plan.with_notes([LedgerEntry("output", str(plan.out), f"it exists already; to run this, {error.hint}")])


def _run_all(
    planned: "Sequence[Planned]",
    execution: Execution,
    stop: Stop,
    workers: "Workers",
    output: "OutputDirectory | None",
) -> None:
    results: dict[Path, Result] = {}
    strict = Strict(execution.strict, [plan.out for plan, _ in planned], execution.gates)
    quiet = execution.quiet or (execution.json and not log.active) or not leads()
    broken: list[GateError] = []
    with ExitStack() as claims:
        outputs = workers.all_or_raise(lambda: [output or _claimed(claims, *item) for item in planned])
        for (plan, report), out in zip(planned, outputs, strict=True):
            timings = execution.timings if leads() else None
            try:
                results[plan.out] = carry_out(plan, stop, quiet, report, workers, strict, timings=timings, output=out)
            except GateError as error:  # nothing of this output was published; the others have gates of their own
                broken.append(error)
                continue
            stop.before += report is None
            if leads() and (log.active or not execution.json):
                tell(plan, results[plan.out], execution.quiet)
    if not leads():
        return
    if execution.json and results:
        found = [result.as_data() for result in results.values()]
        console.print_json(found[0] if len(planned) == 1 else found)
    if broken:
        raise broken[0]


def _claimed(claims: ExitStack, plan: "Plan", report: dict[str, Any] | None) -> "OutputDirectory | None":
    """The output of a plan that is still to be carried out, claimed before anything is computed."""
    from llmcompress.store.output_file import output_of

    if report is not None or not leads():
        return None
    return claims.enter_context(output_of(plan.out, plan.format.name, plan.options.overwrite))


def carry_out(
    plan: "Plan",
    stop: Callable[[int], bool],
    quiet: bool,
    report: dict[str, Any] | None,
    workers: "Workers",
    strict: "Strict",
    tokens: "Tensor | None" = None,
    timings: Path | None = None,
    output: "OutputDirectory | None" = None,
) -> Result:
    """Run a plan and show its progress. workers: the ranks of the run. strict: judges its ledger; GateError.

    output: the plan's, if it is claimed already.

    report: of its output, if an earlier start has finished it: nothing is run.
    """
    _log_plan(plan, report is not None)
    if report is not None:
        found = timed(plan.out, lambda: report)
        strict.judge(plan.out, found.ledger, f"the output is that of an earlier start: {plan.out}")
        return found
    unpublished = f"nothing was written; the same command without it goes on from {plan.work}"

    def judge(entries: "Sequence[LedgerEntry]") -> None:
        try:
            strict.judge(plan.out, entries, unpublished)
        except GateError:
            if not quiet:
                console.ledger(as_json(entries))
            raise

    with watching.of_run(quiet, [len(section) for section in plan.sections]) as watch:
        say = (lambda line: None) if quiet else console.say
        return compression.carried_out(plan, watch, stop, timings, tokens, workers, say, judge, output)


def _log_plan(plan: "Plan", finished: bool) -> None:
    cost = plan.estimate
    log.event(
        "planned",
        output=str(plan.out),
        work=str(plan.work),
        finished_before=finished,
        steps=[step.name for step in plan.recipe.steps],
        format=plan.format.name,
        layers=len(plan.layers),
        matrices=len(plan.matrices),
        compute_dtype=plan.dtype,
        batch=plan.batch,
        threads=plan.resources.threads,
        output_bytes=cost.output_bytes,
        work_bytes=cost.work_bytes,
        memory_bytes=cost.memory_bytes,
        gpu_memory_bytes=cost.gpu_bytes,
        **cost.bits(),
    )


def tell(plan: "Plan", result: Result, quiet: bool) -> None:
    """Say what was written, and what was decided on the way."""
    if not quiet:
        console.ledger(result.report["ledger"])
    cost = plan.estimate
    if log.active:
        log.event(
            "written",
            output=str(plan.out),
            bytes=cost.output_bytes,
            **cost.bits(),
            seconds=result.seconds,
            peak_memory_bytes=result.peak_memory_bytes,
        )
        return
    written = f"{console.size(cost.output_bytes)}, {cost.output_bytes / cost.source_bytes:.0%} of the source"
    took = f"{result.seconds:.1f} s, peak memory {console.size(result.peak_memory_bytes)}"
    console.say(f"{plan.out}: {written}{console.bits(cost.bits_per_quantised_weight)}; {took}")
    if not quiet:
        adapter = () if plan.options.adapter is None else ("--adapter", plan.options.adapter)
        console.next_step("verify", plan.out, "--source", plan.headers.path, *adapter)


class Strict:
    """The gates that --strict asks for: of every output, no ledger entries of some kinds."""

    def __init__(self, kinds: Sequence[str], outputs: Sequence[Path], gates: Gates) -> None:
        self.kinds, self.gates, self._several = kinds, gates, len(outputs) > 1
        gates.expect(self._name(out, kind) for out in outputs for kind in kinds)

    def _name(self, out: Path, kind: str) -> str:
        return f"{out.name}: --strict {kind}" if self._several else f"--strict {kind}"

    def judge(self, out: Path, entries: Sequence[LedgerEntry], hint: str) -> None:
        """GateError with `hint` for entries that are not allowed, once every kind is judged."""
        errors = []
        for kind in self.kinds:
            broken = noted(entries, kind)
            error = noted_error(broken, hint) if broken else None
            message = "" if error is None else error.message.removeprefix("--strict: ")
            self.gates.judge(self._name(out, kind), error is None, len(broken), 0, message)
            errors += [] if error is None else [error]
        if errors:
            raise errors[0]
