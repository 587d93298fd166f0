"""What the report says about a matrix once its codes are chosen."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.run.rtn_ratio import COMPARED, against_rtn, output_energies
from llmcompress.errors import RunError
from llmcompress.grids.coded import Coded
from llmcompress.grids.ggml import gguf_types
from llmcompress.grids.nearest import spread
from llmcompress.methods.base import Solved
from llmcompress.significant import significant
from llmcompress.solve.row_blocks import looked_at
from llmcompress.stats.gram import Gram
from llmcompress.workers import Workers

_LEAST, _MOST = 2.0**-40, 2.0**15  # of the largest magnitude: squares stay within float32, weights within float16


def matrix_record(
    plan: MatrixPlan,
    weight: Tensor,
    coded: Coded,
    hessian: Tensor | None,
    gram: Gram | None,
    solved: Solved,
    workers: Workers,
) -> dict[str, Any]:
    """The record of a matrix in the report. loss: squared output error per token as a share of the output's energy.

    weight [out, in]: of any float type.
    """

    def seen(part: slice) -> tuple[tuple[Tensor, Tensor], list[float]]:
        rows, delta = _with_error(weight, coded, part)
        return (delta.norm(), rows.norm()), [] if hessian is None else output_energies((delta, rows), hessian, workers)

    norms, energies = zip(*map(seen, looked_at(weight)), strict=True)
    error = _relative_error(norms)
    record: dict[str, Any] = {
        "name": plan.module,
        "method": plan.method.name,
        "grid": plan.entry.grid.name if plan.entry.grid else None,
        "shape": [plan.entry.out_features, plan.entry.in_features],
        "permuted": plan.entry.permuted,
        "transposed": plan.entry.transposed,
        "relative_error": error,
    }
    if plan.entry.inputs is not None:
        record["inputs"] = plan.entry.inputs.name
    if coded.input_scale is not None:
        record["input_scale"] = significant(float(coded.input_scale))
    if gram is not None and hessian is not None:
        loss, energy = map(sum, zip(*energies, strict=True))
        record["loss"] = significant(loss / (energy or 1.0))
        record["tokens"] = gram.tokens
        record["percdamp"] = solved.percdamp
        if solved.shrinkage is not None:
            record["shrinkage"] = significant(solved.shrinkage)
    if not isfinite(record.get("loss", 0)):
        raise RunError(f"outputs of {plan.module} are too large for their error to be measured", _way_out(plan))
    if not (error < 1 or record.get("loss", 1) < 1):
        what = "becomes zeros" if error == 1 else f"is no nearer to the source than zeros (relative error {error:.3g})"
        raise RunError(f"{plan.module} on {plan.grid.name} {what}", _way_out(plan))
    if plan.pruner is None and plan.entry.grid is not None and plan.entry.grid.rounds_at_once:
        rows, delta = _with_error(weight, coded, spread(weight.shape[0], COMPARED))
        ratio = against_rtn(rows, delta, plan.entry.grid, hessian, workers)
        record["rtn_ratio"] = None if ratio is None else significant(ratio)
    return record


def recovered_record(record: Mapping[str, Any], weight: Tensor, coded: Coded) -> dict[str, Any]:
    """The record of a matrix [out, in] whose scales have moved since; without what was measured of them before."""
    norms = []
    for part in looked_at(weight):
        rows, delta = _with_error(weight, coded, part)
        norms.append((delta.norm(), rows.norm()))
    kept = {key: value for key, value in record.items() if key not in ("loss", "rtn_ratio")}
    return {**kept, "recovered": True, "relative_error": _relative_error(norms)}


def _relative_error(norms: Sequence[tuple[Tensor, Tensor]]) -> float:
    """||W' - W|| / ||W||, from both norms of parts."""
    missed, norm = (_norm_of(parts) for parts in zip(*norms, strict=True))
    return significant(float(missed / norm.clamp_min(1e-30)))


def _with_error(weight: Tensor, coded: Coded, part: slice) -> tuple[Tensor, Tensor]:
    """Some rows of a weight, and what their codes differ by."""
    rows = weight[part].to(torch.float32)
    return rows, coded.rows(part).decode() - rows  # not in place: unrounded values are their own codes


def _norm_of(parts: Sequence[Tensor]) -> Tensor:
    """The norm of all, from the norms of parts."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).norm()


def refuse_extremes(plan: MatrixPlan, weight: Tensor) -> None:
    """RunError for a matrix whose squares float32 does not hold, or whose weights and scales float16 does not."""
    peak = max(map(abs, map(float, torch.aminmax(weight))))
    if peak and not _LEAST <= peak <= _MOST:
        raise RunError(f"weights of {plan.module} reach {peak:.3g}, too far from 1 to be compressed", _way_out(plan))


def _way_out(plan: MatrixPlan) -> str:
    option = "--tensor-type PATTERN=F32" if gguf_types(plan.method) else "--set 'PATTERN: {skip: true}'"
    return f"leave it as it is: {option}"
