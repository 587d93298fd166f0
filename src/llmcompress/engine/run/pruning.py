"""Pruning the matrices of a layer: what is handed to the step that rounds, and what the report says of zeros."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.grids.coded import Coded
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Statistics
from llmcompress.significant import significant
from llmcompress.solve.prune import Pruned
from llmcompress.solve.row_blocks import looked_at
from llmcompress.solve.sparsegpt import MaskChoice
from llmcompress.workers import Workers

SPARSE = 0.05  # share of zeros above which a matrix has been pruned, so that they are held


def pruned_group(
    group: Sequence[MatrixPlan],
    weights: Sequence[Tensor],
    stats: Statistics,
    ledger: Ledger,
    rounded: bool,
    workers: Workers,
) -> Pruned | MaskChoice | None:
    """What pruning makes of matrices [out, in] that share input and options, whether in this run or before it.

    None where the matrices have hardly any zeros; a MaskChoice where the step that rounds chooses the weights to drop.
    rounded: whether the source was quantised, so that its zeros are not the result of pruning.
    """
    pruner = group[0].pruner
    if pruner is None:
        sparse = not rounded and any(_zeros(weight) > SPARSE for weight in weights)
        return Pruned.of_zeros(torch.cat(list(weights)).to(torch.float32)) if sparse else None
    if pruner.within is not None and group[0].method.compensates:
        return pruner.within
    found = Pruned.stacked(pruner.prune(weights, stats, workers))
    if found.percdamp is not None and found.percdamp > pruner.percdamp:
        ledger.note("damping", group[0].module, f"percdamp of {pruner.name} raised to {found.percdamp:g}")
    return found


def sparsity_record(plan: MatrixPlan, weight: Tensor, coded: Coded, ledger: Ledger, rounded: bool) -> dict[str, Any]:
    """What the report says about zeros. weight: of the source [out, in]. coded: the compressed weight."""
    left = sum(int(torch.count_nonzero(coded.rows(part).decode())) for part in looked_at(weight))
    zeros = (weight.numel() - left) / weight.numel()
    pruner = plan.pruner
    before = 0.0 if rounded else _zeros(weight)
    share = before if pruner is None else pruner.share
    held = zeros >= share - 1 / weight.shape[1]  # a share of a row is rounded to whole weights
    if not held and share > SPARSE:
        ledger.note(
            "sparsity", plan.grid.name, f"{zeros:.1%} of the weights of {plan.module} are zero, not {share:.1%}"
        )
    record: dict[str, Any] = {} if pruner is None else {"pruner": pruner.name}
    if share > SPARSE and zeros > SPARSE:
        record["sparsity"] = significant(zeros)
        if pruner is not None and pruner.pattern is not None and held:
            record["pattern"] = pruner.pattern
    return record


def _zeros(weight: Tensor) -> float:
    """Share of zeros."""
    return (weight.numel() - int(torch.count_nonzero(weight))) / weight.numel()
