"""The runs of a sweep, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmcompress.api.results import Result
from llmcompress.cli import console
from llmcompress.cli.sweep_recipes import Variant
from llmcompress.grids.ggml import gguf_types

if TYPE_CHECKING:
    from llmcompress.engine.plan.plan import Plan


@dataclass
class Run:
    """A run of a sweep and what came of it. report: of an output that an earlier start has finished.

    gated: whether it failed a gate, and nothing else.
    """

    variant: Variant
    plan: "Plan"
    report: dict[str, Any] | None = None
    state: Literal["not begun", "done", "failed", "stopped"] = "not begun"
    error: str | None = None
    gated: bool = False
    result: Result | None = None
    figures: dict[str, Any] = field(default_factory=dict)


def show_runs(runs: Sequence[Run], model: Path, as_json: bool, measured: bool) -> None:
    """Print all runs side by side, for people or as one JSON document. measured: whether they were evaluated."""
    if as_json:
        console.print_json({"model": str(model), "runs": [_facts(run) for run in runs]})
        return
    columns = ("run", "size", "bits/quantised weight", *["perplexity", "KL divergence, 95% interval"] * measured, "")
    rows = [(run.variant.name, *_figures(run, measured), _came_of(run)) for run in runs]
    console.table(None, columns, rows, right=(1, 2, 3) if measured else (1, 2))


def _figures(run: Run, measured: bool) -> list[str]:
    cost, found = run.plan.estimate, run.figures
    bits = cost.bits_per_quantised_weight
    columns = [console.size(cost.output_bytes), f"{bits:.3f}" if bits is not None else ""]
    if not measured:
        return columns
    if not found:
        return [*columns, "", ""]
    from llmcompress.validate.token_statistics import shown

    low, high = found.get("kl_ci", (None, None))
    interval = "" if low is None else f" ({shown(low, 4)} to {shown(high, 4)})"
    return [*columns, shown(found["perplexity"]), f"{shown(found['kl'], 4)}{interval}"]


def _came_of(run: Run) -> str:
    if run.error is not None:
        return f"failed: {run.error}"
    return "finished before" if run.state == "done" and run.report is not None else run.state


def _facts(run: Run) -> dict[str, Any]:
    step, cost = run.plan.recipe.method, run.plan.estimate
    grid = step if step is not None and gguf_types(step) is None else None  # types of GGUF have bits of their own
    return {
        "run": run.variant.name,
        "output": str(run.plan.out),
        "state": run.state,
        "finished_before": run.report is not None,
        "error": run.error,
        "method": run.variant.method,
        "bits": None if grid is None else grid.bits,
        "group_size": None if grid is None else grid.group_size,
        "output_bytes": cost.output_bytes,
        **cost.bits(),
        "seconds": None if run.result is None else run.result.seconds,
        "figures": run.figures or None,
    }
