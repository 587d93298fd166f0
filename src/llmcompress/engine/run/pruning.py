"""Where pruning meets the matrices of a layer: what is handed to the step that rounds, and what is recorded."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Statistics
from llmcompress.solve.prune import Pruned
from llmcompress.solve.sparsegpt import Choice
from llmcompress.workers import Workers

SPARSE = 0.05  # share of zeros above which a matrix has been pruned, so that they are held


def pruned(
    group: Sequence[MatrixPlan],
    weights: Sequence[Tensor],
    stats: Statistics,
    ledger: Ledger,
    rounded: bool,
    workers: Workers,
) -> Pruned | Choice | None:
    """What a pruner makes of matrices [out, in] that share input and options, or made of them before this run.

    None where hardly anything is zero; a Choice where the pruner leaves it to the step that rounds. rounded: whether
    the source was codes, of which zeros are nobody's decision.
    """
    pruner = group[0].pruner
    if pruner is None:
        sparse = not rounded and any(_zeros(weight) > SPARSE for weight in weights)
        return Pruned.of_zeros(torch.cat(list(weights))) if sparse else None
    if pruner.within is not None:
        return pruner.within
    found = Pruned.stacked(pruner.prune(weights, stats, workers))
    if found.percdamp is not None and found.percdamp > pruner.percdamp:
        ledger.note("damping", group[0].module, f"percdamp of {pruner.name} raised to {found.percdamp:g}")
    return found


def sparsity_record(plan: MatrixPlan, weight: Tensor, decoded: Tensor, ledger: Ledger, rounded: bool) -> dict[str, Any]:
    """What the report says about zeros. weight [out, in]: of the source. decoded: what became of it."""
    pruner, zeros = plan.pruner, _zeros(decoded)
    before = 0.0 if rounded else _zeros(weight)
    share = before if pruner is None else pruner.share
    held = zeros >= share - 1 / weight.shape[1]  # a share of a row is rounded to whole weights
    if not held and share > SPARSE:
        ledger.note(
            "sparsity", plan.grid.name, f"{zeros:.1%} of the weights of {plan.module} are zero, not {share:.1%}"
        )
    record: dict[str, Any] = {} if pruner is None else {"pruner": pruner.name}
    if share > SPARSE and zeros > SPARSE:
        record["sparsity"] = float(f"{zeros:.6g}")
        if pruner is not None and pruner.pattern is not None and held:
            record["pattern"] = pruner.pattern
    return record


def _zeros(weight: Tensor) -> float:
    """Share of zeros."""
    return float((weight == 0).sum()) / weight.numel()
