"""Matrices whose source is quantised already, taken over code by code where the wanted type holds their values."""

from typing import Any

from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.run.matrix_record import matrix_record
from llmcompress.errors import RunError
from llmcompress.formats.base import Format
from llmcompress.grids.coded import Coded
from llmcompress.grids.recode import recode
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Solved
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.workers import Workers


def recoded(
    plan: MatrixPlan, format_: Format, checkpoint: Checkpoint, ledger: Ledger, workers: Workers
) -> tuple[MatrixPlan, Coded, dict[str, Any]] | None:
    """A matrix whose source is codes that its grid holds, on no statistics at all; None for any other."""
    grid = plan.entry.grid
    if plan.pruner is not None or grid is None:
        return None
    same = checkpoint.code_grid(plan.module) == grid and not plan.entry.permuted and not plan.method.fixed_inputs
    if not same and not grid.holds_codes:
        return None  # as the plan has said
    source = checkpoint.coded(plan.module)
    if source is None:
        return None
    name, wanted = source.grid.spec.name, grid.name
    found = (source if _fits(plan, format_, source) else None) if same else recode(source, grid)
    if found is None:
        ledger.note("requantised", name, f"decoded and rounded anew to {wanted}, which does not hold its values")
        return None
    record = matrix_record(plan, source.decode(), found, None, None, Solved(found), workers)
    if record["relative_error"]:
        ledger.note("requantised", name, f"its codes are kept in {wanted}, scales and minima rounded to float16")
    return plan, found, {**record, "method": "recoded"}


def _fits(plan: MatrixPlan, format_: Format, source: Coded) -> bool:
    """Whether a format stores a matrix on its grid without a loss: scales may have a type of the source's own."""
    try:
        format_.encode(plan.entry, source)
    except RunError:
        return False
    return True
