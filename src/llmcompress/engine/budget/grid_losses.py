"""What rounding each matrix to each grid would lose: the KL divergence that its errors cause, to second order.

Errors are those that the method itself makes on a sample of rows, as soon as the gradients of a layer are known. The
errors of GPTQ depend on one another, and cost several times less than independent errors of the same size.

GPTQ compensates errors on windows of text, and does so better on these windows than on any other text. Let l be the
loss with endlessly many windows. To first order the loss on the windows that were fitted to is l - c/n, and the loss on
other text is l + c/n, where n is the number of windows fitted to (Akaike, "Fitting autoregressive models for
prediction", 1969). Some windows are held back, so that both losses are measured; together they give the loss that a run
can expect that fits to another number of windows.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from llmcompress.engine.budget.fisher_run import FisherRun
from llmcompress.engine.budget.fisher_window import Window, WindowFisher, WindowSplit
from llmcompress.engine.budget.type_losses import Losses
from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.run.gradient_pass import EMBEDDING, HEAD, FinishedLayers, Found
from llmcompress.engine.run.guidance import GuidancePart, LayerGuidance, layer_guidance, weighed_paths
from llmcompress.grids.base import Clip, Spec
from llmcompress.grids.coded import Coded
from llmcompress.grids.fitting import fit
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Method
from llmcompress.methods.gptq import Gptq
from llmcompress.solve.damping import damped
from llmcompress.solve.gptq import gptq_codes
from llmcompress.solve.prepared import Prepared, column_order
from llmcompress.stats.fisher import Fisher, coupled_loss, expected_loss, sampled_rows
from llmcompress.store.checkpoint import DTYPES, Checkpoint
from llmcompress.store.staging import Staging
from llmcompress.store.statistics import Kept
from llmcompress.workers import Workers

SAMPLED = 1 << 16  # weights of a matrix that are rounded to see what it loses

Wanted = Mapping[str, Sequence[Spec]]
"""The grids to measure, by module."""


def measured_losses(
    plan: Plan,
    fisher_run: FisherRun,
    wanted: Wanted,
    staged: Staging,
    guidance: Kept | None,
    ledger: Ledger,
    watch: Callable[[int, int], None],
) -> Losses:
    """Losses of the plan's matrices, by module and name of grid.

    staged: the work directory of these losses; layers that are finished there are not measured again. guidance: where
    what gradients say is kept for the run. watch: called with how many steps are done, and of how many.
    """
    paths = [[matrix.path for matrix in layer] for layer in plan.layers]
    of, kept = 2 * len(paths) + 1, _LossSections(staged)
    windows = WindowSplit.of(len(fisher_run.windows), plan.recipe.calibration.samples)
    tokens = windows.judging * fisher_run.text.shape[1]

    def gathering(number: int, workers: Workers) -> "_Rounding | _Guiding":
        losses = kept.losses[number] = {
            matrix.module: dict.fromkeys((grid.name for grid in wanted[matrix.module]), 0.0)
            for matrix in plan.layers[number]
        }
        layer, checkpoint = plan.layers[number], fisher_run.checkpoint
        rounding = _Rounding(layer, checkpoint, wanted, windows, tokens, losses, workers)
        if guidance is None:
            return rounding
        return _Guiding(rounding, layer_guidance(plan, number, fisher_run.text.shape), partial(guidance.write, number))

    outside, checkpoint, head = len(paths), fisher_run.checkpoint, plan.head
    wants = bool(head) and not staged.has(outside)
    passed = fisher_run.information(paths, staged.folder, lambda done: watch(done, of), gathering, kept, wants)
    with passed as (found, workers):
        if wants:
            lost = workers.in_order(lambda matrix: _losses_outside(matrix, found, wanted, checkpoint), head)
            staged.write_section(outside, {}, dict(zip((matrix.module for matrix in head), lost, strict=True)))
    losses: Losses = {}
    for number in range(outside + bool(head)):
        losses |= staged.records(number)
    weights = {plan.module: plan.entry.out_features * plan.entry.in_features for plan in plan.matrices}
    measured = {module: known for module, known in losses.items() if any(known.values())}
    for module, known in losses.items():
        if not known:
            losses[module] = _supposed(wanted[module], measured, weights, weights[module])
            ledger.note("budget", module, "not measured: its loss is taken to be that of others for each weight")
        elif not any(known.values()):
            ledger.note("budget", module, "no token came to it, so that any grid seems as good")
    return losses


def _supposed(grids: Sequence[Spec], measured: Losses, weights: Mapping[str, int], own: int) -> dict[str, float]:
    """Losses of a matrix of `own` weights that runs without gradients: for each weight, those of all others on a grid.

    weights: how many each of them has. Where no other has a grid, what the grid before it loses counts.
    """
    found: dict[str, float] = {}
    lost = 0.0
    for grid in grids:
        others = [module for module, known in measured.items() if grid.name in known]
        if others:
            lost = sum(measured[module][grid.name] for module in others) / sum(weights[module] for module in others)
        found[grid.name] = lost * own
    return found


def _losses_outside(matrix: MatrixPlan, found: Found, wanted: Wanted, checkpoint: Checkpoint) -> dict[str, float]:
    """Losses of a head or an embedding by name of grid, each use of it counted.

    Its errors are those of rounding to nearest: what GPTQ loses of a head is less.
    """
    uses = [EMBEDDING] if matrix.space == EMBEDDING else [HEAD, *([EMBEDDING] if matrix.entry.embedding else [])]
    dtype, losses = DTYPES[matrix.entry.source.dtype], dict.fromkeys((grid.name for grid in wanted[matrix.module]), 0.0)
    for fisher in (found[use] for use in uses):
        rows, outputs = _sample(matrix, fisher, checkpoint)[1:]
        for grid in wanted[matrix.module]:
            error = _nearest(matrix.method, rows, grid, dtype) - rows
            losses[grid.name] += expected_loss(error, outputs, fisher.inputs / fisher.inputs.sum())
    return losses


class _LossSections(FinishedLayers):
    """Writes the losses of each layer as a section of the work directory. losses: by layer, until they are written."""

    def __init__(self, staged: Staging) -> None:
        self.staged = staged
        self.losses: dict[int, Losses] = {}

    def seed(self, name: str) -> int:
        return self.staged.seed(name)

    def has(self, layer: int) -> bool:
        return self.staged.has(layer)

    def add(self, layer: int) -> None:
        self.staged.write_section(layer, {}, self.losses.pop(layer))


class _Sample(NamedTuple):
    """Rows [rows, in] float32 of a matrix, with the Fisher information `outputs` of each [rows]."""

    matrix: MatrixPlan
    rows: Tensor
    outputs: Tensor


class _Rounding(WindowFisher):
    """Rounds the matrices of a layer once all windows have passed it, and notes the loss per token."""

    def __init__(
        self,
        layer: Sequence[MatrixPlan],
        checkpoint: Checkpoint,
        wanted: Wanted,
        windows: WindowSplit,
        tokens: int,
        losses: Losses,
        workers: Workers,
    ) -> None:
        grams = any(isinstance(matrix.method, Gptq) for matrix in layer)
        spaces = {matrix.path: matrix.space for matrix in layer}
        super().__init__(spaces, grams, windows, workers, weighed_paths(layer))
        self.layer, self.checkpoint, self.wanted = layer, checkpoint, wanted
        self.windows, self.tokens, self.losses = windows, tokens, losses

    def finish(self, blind: Collection[str]) -> dict[str, Fisher]:
        found = super().finish(blind)
        for matrix in self.layer:
            if matrix.path in blind:
                self.losses[matrix.module] = {}  # not known
        groups: dict[tuple[str, str, tuple[Spec, ...]], list[MatrixPlan]] = {}
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
        self, space: str, samples: Sequence[_Sample], found: Mapping[str, Fisher], grids: Sequence[Spec]
    ) -> Iterator[tuple[Spec, list[float]]]:
        """For each grid the losses of samples that read one space and have one method, summed over tokens."""
        method = samples[0].matrix.method
        rows = torch.cat([sample.rows for sample in samples])
        dtype = DTYPES[samples[0].matrix.entry.source.dtype]
        if isinstance(method, Gptq):
            seen = self.seen(space)
            hessian = seen.mean()
            order = column_order(hessian, by_energy=method.actorder != "none")
            factor = method.factor(hessian, seen.trusted, self.workers, order)
            ready = Prepared(damped(hessian, factor.percdamp, factor.shrinkage), order, factor)
            judges = [self._judge(sample.matrix.path) for sample in samples]

            def rounded(grid: Spec) -> Tensor:
                return _compensated(method, ready, rows.to(hessian.device), grid, dtype)
        else:
            judges = [inputs / inputs.sum() for inputs in (found[s.matrix.path].inputs for s in samples)]

            def rounded(grid: Spec) -> Tensor:
                return _nearest(method, rows, grid, dtype)

        def lost(grid: Spec) -> tuple[Spec, list[float]]:
            errors = torch.split(rounded(grid) - rows, [len(sample.rows) for sample in samples])
            return grid, [
                (coupled_loss if judge.dim() == 2 else expected_loss)(error, sample.outputs, judge)
                for error, sample, judge in zip(errors, samples, judges, strict=True)
            ]

        yield from self.workers.in_order(lost, grids)

    def _judge(self, path: str) -> Tensor:
        """The matrix [in, in] by which a row's errors are judged, as a run can expect it.

        The loss is linear in this matrix, so that `WindowSplit.expected` applies to the matrix itself.
        """
        inside = self.weighed(path, True).cpu()
        if not self.windows.back:
            return inside
        outside = self.weighed(path, False).cpu()
        return self.windows.expected(inside, outside)


class _Guiding:
    """What a run with `--guided` goes by, gathered of the same gradients as the losses, and kept before these are."""

    def __init__(
        self, rounding: _Rounding, guidance: LayerGuidance, keep: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        self._rounding, self._guidance, self._keep = rounding, guidance, keep

    def part(self, path: str, x: Tensor, gradient: Tensor, window: int) -> tuple[Window, GuidancePart | None]:
        guiding = self._guidance.part(path, x, gradient, window) if self._guidance.weighs(path) else None
        return self._rounding.part(path, x, gradient, window), guiding

    def add(self, path: str, part: tuple[Window, GuidancePart | None], window: int) -> None:
        self._rounding.add(path, part[0], window)
        if part[1] is not None:
            self._guidance.add(path, part[1], window)

    def finish(self, blind: Collection[str]) -> dict[str, Fisher]:
        self._keep(self._guidance.tensors())
        return self._rounding.finish(blind)


def _sample(matrix: MatrixPlan, fisher: Fisher, checkpoint: Checkpoint) -> _Sample:
    weight = checkpoint.read_finite(matrix.entry.source.name)
    weight = weight.T if matrix.conv1d else weight
    rows, outputs = sampled_rows(fisher.outputs, max(1, SAMPLED // weight.shape[1]))
    return _Sample(matrix, weight[rows].to(torch.float32), outputs)


def _compensated(method: Gptq, ready: Prepared, rows: Tensor, grid: Spec, dtype: torch.dtype) -> Tensor:
    """The values [rows, in] float32 that GPTQ rounds rows to."""
    gram = ready.refiner.hessian if method.clip == "output" else None
    fitted = fit(rows, grid, clip=method.clip, importance=ready.cost, gram=gram, scale_dtype=dtype)
    coded = gptq_codes(rows, fitted, ready.factor, ready.order, method.block_size)
    return ready.refiner.refine(rows, coded, dtype, method.descent).decode().cpu()


def _nearest(method: Method, rows: Tensor, grid: Spec, dtype: torch.dtype) -> Tensor:
    """The values [rows, in] float32 that rounding to nearest gives."""
    clip: Clip = "minmax" if method.clip == "minmax" else "search"  # near enough to the search by outputs
    fitted = fit(rows, grid, clip=clip, scale_dtype=dtype)
    return Coded(fitted.encode(rows), fitted).decode()
