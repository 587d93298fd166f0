"""Carrying plans out, and telling what came of it."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcompress.cli import console
from llmcompress.cli.gates import Gates
from llmcompress.cli.log import log
from llmcompress.errors import GateError, RecipeError
from llmcompress.ledger import KINDS
from llmcompress.registry import suggest

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.engine.plan.plan import Plan


def carry_out(
    plan: "Plan",
    stop: Callable[[int], bool],
    quiet: bool,
    report: dict[str, Any] | None,
    tokens: "Tensor | None" = None,
    timings: Path | None = None,
) -> dict[str, Any]:
    """The report of a run, with what it took. report: what an earlier start has written, if it has finished the run.

    timings: file for the time and memory of each layer.
    """
    from llmcompress.engine.execute import run
    from llmcompress.engine.process.process_memory import peak_memory
    from llmcompress.engine.write.timings import Timings

    begin, finished = time.perf_counter(), report is not None
    _log_plan(plan, finished)
    if report is None:
        with console.watching(quiet) as watch, _sweeping(plan, quiet):
            timed = None if timings is None else Timings(timings, plan, watch)
            report = run(plan, timed or watch, stop, tokens)
            if timed is not None:
                timed.end()
    seconds = round(time.perf_counter() - begin, 2)
    return {**report, "output": str(plan.out), "seconds": seconds, "peak_memory_bytes": peak_memory()}


def _sweeping(plan: "Plan", quiet: bool) -> AbstractContextManager[None]:
    """Within, a GPU decides blocks of columns by a kernel, where it can."""
    if not plan.resources.gpu or not any(matrix.inverts for layer in plan.layers for matrix in layer):
        return nullcontext()
    from llmcompress.engine.process.ranks import device_of
    from llmcompress.kernels.sweep import gpu_sweeper
    from llmcompress.solve.sweep import swept_by

    def say(line: str) -> None:
        if not quiet:
            console.say(line)

    return swept_by(gpu_sweeper(device_of(plan.options.device), say))


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
        matrices=sum(len(layer) for layer in plan.layers),
        compute_dtype=plan.dtype,
        batch=plan.batch,
        threads=plan.resources.threads,
        output_bytes=cost.output_bytes,
        work_bytes=cost.work_bytes,
        memory_bytes=cost.memory_bytes,
        gpu_memory_bytes=cost.gpu_bytes,
        bits_per_weight=round(cost.bits_per_weight, 4),
    )


def tell(plan: "Plan", result: dict[str, Any], quiet: bool) -> None:
    """Say what was written, and what was decided on the way."""
    if not quiet:
        console.ledger(result["ledger"])
    cost, spent = plan.estimate, {name: result[name] for name in ("seconds", "peak_memory_bytes")}
    if log.active:
        bits = round(cost.bits_per_weight, 4)
        log.event("written", output=str(plan.out), bytes=cost.output_bytes, bits_per_weight=bits, **spent)
        return
    written = f"{console.size(cost.output_bytes)}, {cost.output_bytes / cost.source_bytes:.0%} of the source"
    took = f"{spent['seconds']:.1f} s, peak memory {console.size(spent['peak_memory_bytes'])}"
    console.say(f"{plan.out}: {written}, {cost.bits_per_weight:.2f} bits per weight; {took}")


def refuse_unknown_kinds(kinds: Sequence[str]) -> None:
    """RecipeError for what --strict names and the ledger does not know."""
    for kind in kinds:
        if kind not in (*KINDS, "any"):
            raise RecipeError(f"--strict {kind!r} is not a kind of ledger entry", suggest(kind, [*KINDS, "any"]))


def strict_gates(kinds: Sequence[str], outputs: Sequence[Path]) -> list[tuple[Path, str, str]]:
    """Every gate that --strict asks for: output, kind, and what it is called."""
    several = len(outputs) > 1
    return [(out, kind, f"{out.name}: --strict {kind}" if several else f"--strict {kind}")
            for out in outputs for kind in kinds]  # fmt: skip


def judge_strict(result: dict[str, Any], kind: str, name: str, gates: Gates) -> GateError | None:
    """Whether the ledger has entries that --strict does not allow."""
    broken = [entry for entry in result["ledger"] if kind in ("any", entry["kind"])]
    if not broken:
        gates.judge(name, True, 0, 0, "")
        return None
    first = broken[0]
    message = f"{len(broken)} ledger entries, first {first['kind']}: {first['subject']}: {first['why']}"
    gates.judge(name, False, len(broken), 0, message)
    return GateError(f"--strict: {message}", f"the output was written to {result['output']}; see its report.json")
