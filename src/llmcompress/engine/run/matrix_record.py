"""What the report says about a matrix once its codes are chosen."""

from typing import Any

from torch import Tensor

from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.run.rtn_ratio import against_rtn, output_energies
from llmcompress.grids.coded import Coded
from llmcompress.methods.base import Solved
from llmcompress.stats.gram import Gram
from llmcompress.workers import Workers


def matrix_record(
    plan: MatrixPlan,
    weight: Tensor,
    coded: Coded,
    hessian: Tensor | None,
    gram: Gram | None,
    solved: Solved,
    workers: Workers,
) -> dict[str, Any]:
    """The record of a matrix in the report. loss: squared output error per token as a share of the output's energy."""
    delta = coded.decode() - weight
    record: dict[str, Any] = {
        "name": plan.module,
        "method": plan.method.name,
        "grid": plan.entry.grid.name if plan.entry.grid else None,
        "shape": [plan.entry.out_features, plan.entry.in_features],
        "permuted": plan.entry.permuted,
        "transposed": plan.entry.transposed,
        "relative_error": _significant(float(delta.norm() / weight.norm().clamp_min(1e-30))),
    }
    if plan.entry.inputs is not None:
        record["inputs"] = plan.entry.inputs.name
    if coded.input_scale is not None:
        record["input_scale"] = _significant(float(coded.input_scale))
    if gram is not None and hessian is not None:
        loss, energy = output_energies((delta, weight), hessian, workers)
        record["loss"] = _significant(loss / max(energy, 1e-30))
        record["tokens"] = gram.tokens
        record["percdamp"] = solved.percdamp
    if plan.pruner is None and plan.entry.grid is not None and plan.entry.grid.rounds_at_once:
        ratio = against_rtn(weight, delta, plan.entry.grid, hessian, workers)
        record["rtn_ratio"] = None if ratio is None else _significant(ratio)
    return record


def _significant(value: float) -> float:
    return float(f"{value:.6g}")
