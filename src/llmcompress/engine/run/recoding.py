"""Matrices whose source is quantised already, taken over code by code where the wanted type holds their values."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.run.matrix_record import matrix_record
from llmcompress.errors import RunError
from llmcompress.formats.base import Format
from llmcompress.grids.coded import Coded
from llmcompress.grids.grid_type import restored
from llmcompress.grids.inputs import fixed_for
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
    if plan.pruner is not None or grid is None or plan.factors:
        return None
    same = checkpoint.code_grid(plan.module, format_.scales_of_sources) == grid and not plan.entry.permuted
    inputs = plan.entry.inputs if same and plan.method.fixed_inputs else None
    fixed = None if inputs is None else fixed_for(checkpoint.inputs(plan.module), inputs)
    same = same and plan.method.fixed_inputs == (fixed is not None)
    if not same and not grid.holds_codes:
        return None  # as the plan has said
    source = checkpoint.coded(plan.module)
    if source is None:
        return None
    name, wanted = source.grid.spec.name, grid.name
    source = replace(source, input_scale=fixed)
    found = _same(plan, format_, source) if same else recode(source, grid)
    if found is None:
        ledger.note("requantised", name, f"decoded and rounded anew to {wanted}, which does not hold its values")
        return None
    record = matrix_record(plan, source.decode(), found, None, None, Solved(found), workers)
    if record["relative_error"] and not same:
        ledger.note("requantised", name, f"its codes are kept in {wanted}, scales and minima rounded to float16")
    return plan, found, {**record, "method": "recoded"}


def kept_together(
    stage: Sequence[MatrixPlan], kept: Sequence[tuple[MatrixPlan, Coded, dict[str, Any]]], ledger: Ledger
) -> list[tuple[MatrixPlan, Coded, dict[str, Any]]]:
    """Those of the matrices of a stage that keep their codes beside matrices that share what scales are made of.

    Where matrices that read one input must share it, all of them keep their codes, or none.
    """
    found = {plan.module: coded for plan, coded, _ in kept}
    apart: set[str] = set()
    for plan in stage:
        if plan.entry.grid is None or not plan.entry.grid.joins_matrices:
            continue
        others = [other for other in stage if (other.space, other.settings) == (plan.space, plan.settings)]
        shared = [_shared(found[other.module]) for other in others if other.module in found]
        if plan.module in found and (len(shared) < len(others) or any(item != shared[0] for item in shared)):
            apart.add(plan.module)
            ledger.note(
                "requantised", plan.module, f"its codes on {plan.grid.name} have a scale that its neighbours lack"
            )
    return [item for item in kept if item[0].module not in apart]


def _shared(coded: Coded) -> list[list[float]]:
    """What all rows of a matrix have in common, and what is fixed of its inputs."""
    fixed = [] if coded.input_scale is None else [coded.input_scale.tolist()]
    return [getattr(coded.grid, name).reshape(-1).tolist() for name in coded.grid.shared] + fixed


def _same(plan: MatrixPlan, format_: Format, source: Coded) -> Coded | None:
    """A matrix as work directories keep it; None where a format stores its scales in another type, or not its order."""
    if source.grid.spec != plan.entry.grid:
        return None
    found = restored(source.grid.spec, source.stored())
    try:
        format_.encode(plan.entry, found)
    except RunError:
        return None
    return found
