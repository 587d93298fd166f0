"""What rounding each matrix to each grid would lose: the KL divergence that its errors cause, to second order.

Errors are those of the method itself, on a sample of rows, as soon as the gradients of a layer are known: GPTQ's depend
on one another and cost several times less than as many independent ones.

GPTQ makes up for errors on windows of text, and does so better on these than on any other text: its loss there is too
low by as much, to first order, as that on other text is higher than it would be with windows without end, and both
differences are as one over the number of windows (Akaike, "Fitting autoregressive models for prediction", 1969). So
some windows are held back, which gives both, and from both what a run is to expect that fits to as many as it will.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llmcompress.engine.budget.fisher_pass import Finished
from llmcompress.engine.budget.fisher_run import Measuring
from llmcompress.engine.budget.fisher_window import ByWindow
from llmcompress.engine.budget.type_losses import Losses
from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.plan.plan import Plan
from llmcompress.grids.base import Clip
from llmcompress.grids.coded import Coded
from llmcompress.grids.integer import IntegerSpec, fit
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Method
from llmcompress.methods.gptq import Gptq
from llmcompress.solve.damping import inverse_factor
from llmcompress.solve.gptq import gptq_codes
from llmcompress.solve.prepared import Prepared, column_order
from llmcompress.stats.fisher import Fisher, coupled_loss, expected_loss, sampled_rows
from llmcompress.store.checkpoint import DTYPES, Checkpoint
from llmcompress.store.staging import Staging
from llmcompress.workers import Workers

SAMPLED = 1 << 16  # weights of a matrix that are rounded to see what it loses

Wanted = Mapping[str, Sequence[IntegerSpec]]
"""Grids by module."""


def measured_losses(
    plan: Plan,
    measuring: Measuring,
    wanted: Wanted,
    staged: Staging,
    ledger: Ledger,
    watch: Callable[[int, int], None],
) -> Losses:
    """Losses of the plan's matrices by the names of grids. watch: told how many steps of all are done.

    staged: of these losses; layers that are finished there are not measured again.
    """
    paths = [[matrix.path for matrix in layer] for layer in plan.layers]
    of, kept = 2 * len(paths) + 1, _Kept(staged)
    windows = Held.of(measuring.tokens.shape[0], plan.recipe.calibration.samples)
    tokens = measuring.tokens.numel()

    def gathering(number: int, workers: Workers) -> "_Rounding":
        losses = kept.losses[number] = {
            matrix.module: dict.fromkeys((grid.name for grid in wanted[matrix.module]), 0.0)
            for matrix in plan.layers[number]
        }
        return _Rounding(plan.layers[number], measuring.checkpoint, wanted, windows, tokens, losses, workers)

    with measuring.information(paths, staged.path, lambda done: watch(done, of), gathering, kept):
        pass
    losses: Losses = {}
    for number in range(len(paths)):
        losses |= staged.records(number)
    for module, known in losses.items():
        if not any(known.values()):
            ledger.note("budget", module, "no token came to it, so that any grid seems as good")
    return losses


class _Kept(Finished):
    """Losses of a layer are a section of the work directory; losses: of those that are found now, by layer."""

    def __init__(self, staged: Staging) -> None:
        self.staged = staged
        self.losses: dict[int, Losses] = {}

    def has(self, layer: int) -> bool:
        return self.staged.has(layer)

    def add(self, layer: int) -> None:
        self.staged.write_section(layer, {}, self.losses.pop(layer))


class Held(NamedTuple):
    """Windows that a method fits to while it is measured, and later in the run, and how many are held back."""

    fitted: int
    back: int
    later: int

    @classmethod
    def of(cls, windows: int, later: int) -> "Held":
        """A quarter of the windows is held back; of a single one nothing can be."""
        back = min(max(1, windows // 4), windows - 1)
        return cls(windows - back, back, max(later, windows))

    def expected(self, inside: Tensor, outside: Tensor) -> Tensor:
        """The loss on other text with `later` windows, or what it is a linear function of.

        inside, outside: in the windows that were fitted to, and in those held back.
        They are l - c / fitted and l + c / fitted with l for windows without end; sought is l + c / later.
        """
        share = self.fitted / self.later
        return (inside * (1 - share) + outside * (1 + share)) / 2


class _Sample(NamedTuple):
    """Rows [rows, in] float32 of a matrix, with the Fisher information `outputs` of each [rows]."""

    matrix: MatrixPlan
    rows: Tensor
    outputs: Tensor


class _Rounding(ByWindow):
    """Rounds the matrices of a layer when all windows have been through it, and notes what that loses per token."""

    def __init__(
        self,
        layer: Sequence[MatrixPlan],
        checkpoint: Checkpoint,
        wanted: Wanted,
        windows: Held,
        tokens: int,
        losses: Losses,
        workers: Workers,
    ) -> None:
        grams = any(isinstance(matrix.method, Gptq) for matrix in layer)
        super().__init__({matrix.path: matrix.space for matrix in layer}, grams, windows.fitted, workers)
        self.layer, self.checkpoint, self.wanted = layer, checkpoint, wanted
        self.windows, self.tokens, self.losses = windows, tokens, losses

    def finish(self) -> dict[str, Fisher]:
        found = super().finish()
        groups: dict[tuple[str, str, tuple[IntegerSpec, ...]], list[MatrixPlan]] = {}
        for matrix in self.layer:
            if matrix.path in found and float(found[matrix.path].outputs.sum()) > 0:
                key = self.spaces[matrix.path], matrix.method.model_dump_json(), tuple(self.wanted[matrix.module])
                groups.setdefault(key, []).append(matrix)
        for (space, _, grids), members in groups.items():
            samples = [_sample(matrix, found[matrix.path], self.checkpoint) for matrix in members]
            for grid, lost in self._lost(space, samples, found, grids):
                for sample, loss in zip(samples, lost, strict=True):
                    self.losses[sample.matrix.module][grid.name] = loss / self.tokens
        return found

    def _lost(
        self, space: str, samples: Sequence[_Sample], found: Mapping[str, Fisher], grids: Sequence[IntegerSpec]
    ) -> Iterator[tuple[IntegerSpec, list[float]]]:
        """What samples that read a space and have one method lose by each grid, summed over tokens."""
        method = samples[0].matrix.method
        rows = torch.cat([sample.rows for sample in samples])
        dtype = DTYPES[samples[0].matrix.entry.source.dtype]
        if isinstance(method, Gptq):
            hessian = self.seen(space)
            order = column_order(hessian, by_energy=method.actorder != "none")
            ready = Prepared(hessian, order, inverse_factor(hessian[order][:, order], method.percdamp))
            judges = [self._judge(sample.matrix.path) for sample in samples]

            def rounded(grid: IntegerSpec) -> Tensor:
                return _compensated(method, ready, rows.to(hessian.device), grid, dtype)
        else:
            judges = [inputs / inputs.sum() for inputs in (found[s.matrix.path].inputs for s in samples)]

            def rounded(grid: IntegerSpec) -> Tensor:
                return _nearest(method, rows, grid, dtype)

        def lost(grid: IntegerSpec) -> tuple[IntegerSpec, list[float]]:
            errors = torch.split(rounded(grid) - rows, [len(sample.rows) for sample in samples])
            return grid, [
                (coupled_loss if judge.dim() == 2 else expected_loss)(error, sample.outputs, judge)
                for error, sample, judge in zip(errors, samples, judges, strict=True)
            ]

        yield from self.workers.in_order(lost, grids)

    def _judge(self, path: str) -> Tensor:
        """What errors of a row count [in, in] in a run; linear in it as they are, both kinds of windows are one sum."""
        inside = self.weighed(path, True).cpu()
        if not self.windows.back:
            return inside
        outside = self.weighed(path, False).cpu()
        return self.windows.expected(inside, outside)


def _sample(matrix: MatrixPlan, fisher: Fisher, checkpoint: Checkpoint) -> _Sample:
    weight = checkpoint.read_finite(matrix.entry.source.name)
    weight = weight.T if matrix.conv1d else weight
    rows, outputs = sampled_rows(fisher.outputs, max(1, SAMPLED // weight.shape[1]))
    return _Sample(matrix, weight[rows].to(torch.float32), outputs)


def _compensated(method: Gptq, ready: Prepared, rows: Tensor, grid: IntegerSpec, dtype: torch.dtype) -> Tensor:
    """Values float32 [rows, in] of rows as GPTQ rounds them."""
    gram = ready.refiner.hessian if method.clip == "output" else None
    fitted = fit(rows, grid, clip=method.clip, importance=ready.cost, gram=gram, scale_dtype=dtype)
    coded = gptq_codes(rows, fitted, ready.factor, ready.order, method.block_size)
    return ready.refiner.refine(rows, coded, dtype, method.descent).decode().cpu()


def _nearest(method: Method, rows: Tensor, grid: IntegerSpec, dtype: torch.dtype) -> Tensor:
    """Values float32 [rows, in] of rows rounded to nearest."""
    clip: Clip = "minmax" if method.clip == "minmax" else "search"  # near enough to the search by outputs
    fitted = fit(rows, grid, clip=clip, scale_dtype=dtype)
    return Coded(fitted.encode(rows), fitted).decode()
