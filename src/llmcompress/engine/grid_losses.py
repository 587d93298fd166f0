"""What rounding each matrix to each grid would lose: the KL divergence that its errors cause, to second order."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from llmcompress.engine.gathering import ByWindow
from llmcompress.engine.losses import Losses
from llmcompress.engine.measure import Measuring
from llmcompress.engine.plan import MatrixPlan, Plan
from llmcompress.engine.sensitivity import Found
from llmcompress.grids.base import GridSpec
from llmcompress.grids.coded import Coded
from llmcompress.grids.integer import Clip, fit
from llmcompress.ledger import Ledger
from llmcompress.methods.gptq import Gptq
from llmcompress.parallel import in_order
from llmcompress.stats.fisher import Fisher, expected_loss, sampled_rows
from llmcompress.store.checkpoint import DTYPES, Checkpoint

_SAMPLED = 1 << 16  # weights of a matrix that are rounded to see what it loses

Wanted = Mapping[str, Sequence[GridSpec]]
"""Grids by module."""


def measured_losses(
    plan: Plan, measuring: Measuring, wanted: Wanted, ledger: Ledger, watch: Callable[[int, int], None]
) -> Losses:
    """Losses of the plan's matrices by the names of grids.

    Of gptq, errors count by what is left of them after compensation (solve/compensation.py). watch: told how many steps
    of all are done.
    """
    matrices = [matrix for layer in plan.layers for matrix in layer]
    paths = [[matrix.path for matrix in layer] for layer in plan.layers]
    steps, of = count(1), 2 * len(paths) + 1 + len(matrices)

    def step() -> None:
        watch(next(steps), of)

    def gathering(number: int) -> ByWindow:
        layer = plan.layers[number]
        method = layer[0].method if layer else None
        return ByWindow(
            {matrix.path: matrix.space for matrix in layer}, method.percdamp if isinstance(method, Gptq) else None
        )

    with measuring.information(paths, step, gathering) as (found, checkpoint):
        losses: Losses = {
            matrix.module: dict.fromkeys((g.name for g in wanted[matrix.module]), 0.0) for matrix in matrices
        }
        samples = _samples(matrices, found, checkpoint, ledger, step)
        for module, lost in in_order(lambda sample: (sample.module, _rounded(sample, wanted)), samples):
            losses[module] = lost
        return losses


class _Sample(NamedTuple):
    """Rows [rows, in] float32 of a matrix, with the Fisher information outputs [rows] times inputs [in].

    The inputs are as the method's errors weigh, relative to all that outputs are the sum of.
    """

    module: str
    rows: Tensor
    outputs: Tensor
    inputs: Tensor
    matrix: MatrixPlan


def _samples(
    matrices: Iterable[MatrixPlan], found: Found, checkpoint: Checkpoint, ledger: Ledger, step: Callable[[], None]
) -> Iterator[_Sample]:
    for matrix in matrices:
        fisher = found.get((matrix.layer, matrix.path))
        if fisher is None:
            ledger.note("budget", matrix.module, "no token came to it, so that any grid seems as good")
        elif float(fisher.outputs.sum()) > 0:
            yield _sample(matrix, fisher, checkpoint)
        step()


def _sample(matrix: MatrixPlan, fisher: Fisher, checkpoint: Checkpoint) -> _Sample:
    weight = checkpoint.read_finite(matrix.entry.source.name)
    weight = weight.T if matrix.conv1d else weight
    rows, weights = sampled_rows(fisher.outputs, max(1, _SAMPLED // weight.shape[1]))
    inputs = fisher.inputs / fisher.outputs.sum()
    return _Sample(matrix.module, weight[rows].to(torch.float32).contiguous(), weights, inputs, matrix)


def _rounded(sample: _Sample, wanted: Wanted) -> dict[str, float]:
    """What a sample loses by each grid."""
    method, dtype = sample.matrix.method, DTYPES[sample.matrix.entry.source.dtype]
    clip: Clip = "minmax" if method.clip == "minmax" else "search"
    importance = sample.inputs.to(torch.float32) if isinstance(method, Gptq) else None
    lost = {}
    for grid in wanted[sample.module]:
        fitted = fit(sample.rows, grid, clip=clip, importance=importance, scale_dtype=dtype)
        error = Coded(fitted.encode(sample.rows), fitted).decode() - sample.rows
        lost[grid.name] = expected_loss(error, sample.outputs, sample.inputs)
    return lost
