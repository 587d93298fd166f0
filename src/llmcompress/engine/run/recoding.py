"""Matrices whose source is quantised already, taken over code by code where the wanted type holds their values."""

from typing import Any

from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.run.matrix_record import matrix_record
from llmcompress.grids.coded import Coded
from llmcompress.grids.recode import recode
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Solved
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.workers import Workers


def recoded(
    plan: MatrixPlan, checkpoint: Checkpoint, ledger: Ledger, workers: Workers
) -> tuple[MatrixPlan, Coded, dict[str, Any]] | None:
    """A matrix whose source is codes that its type holds, on no statistics at all; None for any other."""
    grid = plan.entry.grid
    if plan.pruner is not None or grid is None or not grid.holds_codes:
        return None  # as the plan has said
    source = checkpoint.coded(plan.module)
    if source is None:
        return None
    name, wanted = source.grid.spec.name, grid.name
    found = recode(source, grid)
    if found is None:
        ledger.note("requantised", name, f"decoded and rounded anew to {wanted}, which does not hold its values")
        return None
    record = matrix_record(plan, source.decode(), found, None, None, Solved(found), workers)
    if record["relative_error"]:
        ledger.note("requantised", name, f"its codes are kept in {wanted}, scales and minima rounded to float16")
    return plan, found, {**record, "method": "recoded"}
