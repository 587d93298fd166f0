"""Execution of a plan: the calibrated loop runs section by section, then the output appears, whole or not at all."""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from torch import Tensor

from llmcompress.calib.base import fingerprint
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.process.process_memory import keep_freed_memory
from llmcompress.engine.process.progress import Progress
from llmcompress.engine.run.kept_statistics import reusable_statistics, statistics_of_run
from llmcompress.engine.run.loop import Sections, Stop, run_calibrated, run_uncalibrated
from llmcompress.engine.run.opened_model import opened_model
from llmcompress.engine.run.owl import with_owl_sparsities
from llmcompress.engine.run.start import refuse_early, tokens_of
from llmcompress.engine.run.transformed import open_transformed
from llmcompress.engine.write.publish import Judge, finish
from llmcompress.hardware import exact_float32
from llmcompress.solve.column_sweep import Sweeper
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.output import OutputDirectory
from llmcompress.store.output_file import output_of
from llmcompress.store.staging import Staging, begun_run
from llmcompress.store.statistics import Kept, kept_statistics
from llmcompress.workers import SERIAL, Workers


def run(
    plan: Plan,
    progress: Progress | None = None,
    stop: Stop = lambda finished: False,
    tokens: Tensor | None = None,
    workers: Workers = SERIAL,
    sweeper: Sweeper | None = None,
    judge: Judge = lambda entries: None,
    output: OutputDirectory | None = None,
) -> dict[str, Any]:
    """Carry a plan out and return its report. A rerun goes on after the last finished section.

    stop: is asked before every section, and is given the number of sections that this start has finished. When it
    returns True, the run ends with StoppedError, and a later start can go on with it. tokens: the calibration tokens
    [samples, length], where the caller has drawn them already. workers: the ranks of the run, to which the threads of
    the plan are added; rank 0 writes the output and returns the report, every other rank returns an empty dict.
    sweeper: what decides blocks of columns on the plan's device; None for torch. judge: sees the whole ledger before
    anything is published, and may raise; the work stays for the next start. output: the plan's, where the caller has
    claimed it already.
    """
    refuse_early(plan, workers.size)
    with ExitStack() as stack:

        def claimed() -> OutputDirectory | None:
            if output is not None or workers.rank > 0:
                return output
            return stack.enter_context(output_of(plan.out, plan.format.name, plan.options.overwrite))

        out = workers.all_or_raise(claimed)
        return _run(plan, progress or Progress(), stop, tokens, workers, sweeper, judge, out)


def _run(
    plan: Plan,
    progress: Progress,
    stop: Stop,
    tokens: Tensor | None,
    workers: Workers,
    sweeper: Sweeper | None,
    judge: Judge,
    out: OutputDirectory | None,
) -> dict[str, Any]:
    """`run` with the claimed output of rank 0."""
    tokens = workers.broadcast(lambda: tokens_of(plan, tokens))
    identity = {**plan.identity, "tokens": fingerprint(tokens) if tokens is not None else None}
    checkpoint = open_transformed(plan)
    known, keeping = _statistics(plan, identity["tokens"], workers)
    if known is not None:
        identity["statistics"] = known.key
    with closing(_opened(plan, identity, workers)) as staged:
        if tokens is not None and plan.recipe.calibration.source == "self" and workers.rank == 0:
            staged.keep_tokens(tokens)  # sampling takes minutes, and depends on nothing but model and recipe
        missing = workers.broadcast(lambda: staged.missing(len(plan.sections)))
        progress.start(len(plan.sections), len(plan.sections) - len(missing))
        keep_freed_memory()
        with workers.with_threads(plan.resources.threads) as threaded, exact_float32():
            sections = Sections(plan, staged, progress, stop, missing, threaded)
            if tokens is None or known is not None:
                run_uncalibrated(plan, checkpoint, sections, known, sweeper)
            elif missing:
                _calibrate(plan, checkpoint, tokens, sections, keeping, sweeper)

        if out is None:
            return {}
        calibration = None
        if tokens is not None:
            calibration = {"sha256": identity["tokens"], "samples": tokens.shape[0], "length": tokens.shape[1]}
        staged.remember_place(
            model=plan.headers.path,
            adapter=plan.options.adapter,
            calibration=calibration,
            trust_remote_code=plan.options.trust_remote_code,
            origin={"base_model": plan.recipe.output.base_model, "license": plan.recipe.output.license},
        )
        progress.writing(plan.estimate.output_bytes)
        result = finish(plan, staged, calibration, out, judge)
        if not plan.options.keep_work:
            staged.remove()
        return result


def _calibrate(
    plan: Plan,
    checkpoint: Checkpoint,
    tokens: Tensor,
    sections: Sections,
    keeping: Kept | None,
    sweeper: Sweeper | None,
) -> None:
    """Settle what of the plan is measured, which are the sparsities of OWL; then compress layer by layer."""
    model = opened_model(checkpoint, plan.spec, plan.dtype, plan.options)
    settled = with_owl_sparsities(plan, model, tokens, sections.staged.folder, sections.workers)
    run_calibrated(settled, checkpoint, model, tokens, sections, keeping, sweeper)


def _opened(plan: Plan, identity: dict[str, Any], workers: Workers) -> Staging:
    """The work directory, which rank 0 makes and locks."""
    restart = plan.options.restart
    made = workers.all_or_raise(lambda: Staging(plan.work, identity, restart=restart) if workers.rank == 0 else None)
    return workers.all_or_raise(lambda: made or Staging(plan.work, identity, leads=False))


def _statistics(plan: Plan, tokens: str | None, workers: Workers) -> tuple[Kept | None, Kept | None]:
    """Statistics of another run to go by, and where this one keeps its own: rank 0 chooses, and keeps."""

    keeping = None

    def chosen() -> str | None:
        nonlocal keeping
        if plan.options.stats is None or tokens is None:
            return None
        begun = {} if plan.options.restart else begun_run(plan.work)
        known = reusable_statistics(plan, plan.options.stats, tokens, begun.get("statistics"))
        if known is None:
            keeping = statistics_of_run(plan, plan.options.stats, tokens)
        return None if known is None else str(known.path)

    found = workers.broadcast(chosen)
    return None if found is None else kept_statistics(Path(found)), keeping
