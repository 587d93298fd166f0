"""Scales and gains of a layer whose codes are chosen, fitted to what left the layer before (`--recover block`).

As in EfficientQAT (arXiv:2407.11062, Block-AP), but that codes stay: the compressed layer, on what enters it from the
compressed layers before it, is to give what the original gave. A token's squared error counts as a share of its energy,
as a norm comes next; else the first tokens of windows, a thousand times as large as others, would outweigh all others.
Where gradients of the prediction are known (`--guided`), those at the matrix that adds to the hidden states last are
those at what leaves the layer: then tokens have their weights, and errors count by the products at two channels.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmcompress.arch.spec import RESIDUAL
from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.run.guidance import Guidance
from llmcompress.engine.run.installed import has_module, values_of
from llmcompress.engine.run.transformed import fold_gains
from llmcompress.engine.train.places import TrainedPlace, add_slopes, mark, norm_offsets, norms_of, slopes_of, weight_at
from llmcompress.engine.train.trained import Trained, TrainedMatrix, TrainedNorm
from llmcompress.engine.train.training import AT_ONCE, BLOCK_STEPS, NoGainError, Training, held_apart
from llmcompress.grids.coded import Coded
from llmcompress.ledger import Ledger
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.significant import significant
from llmcompress.solve.output_feedback import DAMPING
from llmcompress.store.checkpoint import DTYPES
from llmcompress.store.folds import FoldedCheckpoint
from llmcompress.store.windows import Windows
from llmcompress.workers import Workers

_SHARE = 3 / 100  # of the mean relative error of the matrices: the rate


class RecoveredLayer(NamedTuple):
    """coded: codes on new scales, by module. gains: by name of a norm's weight, what its gains are multiplied by.

    record: for the report, None where the layer could not be judged.
    """

    coded: Mapping[str, Coded]
    gains: Mapping[str, Tensor]
    record: dict[str, Any] | None


def recovered_layer(
    learner: "LayerLearner",
    errors: Sequence[float],
    entering: Windows,
    leaving: Windows | None,
    guidance: Guidance,
    workers: Workers,
) -> RecoveredLayer:
    """Train a layer, and leave in it what the files will hold.

    errors: relative ones of its matrices. entering: hidden states of the compressed model. leaving: of the original,
    behind the layer; ranks other than 0 need none. guidance: of the layer.
    """
    plan, number = learner.plan, learner.number

    def learn() -> tuple[dict[str, Tensor], dict[str, Any] | None, str]:
        assert leaving is not None
        learner.begin(entering, leaving, _measure(plan, number, guidance), workers.without_ranks())
        text = held_apart({"calibration": torch.empty(leaving.shape[0], 0)})
        rate = _SHARE * sum(errors) / len(errors)
        training = Training(learner, text, BLOCK_STEPS, AT_ONCE, rate, plan.recipe.calibration.seed)
        try:
            first, best = training.run(None)
            learnt, why = {name: item.learnt for name, item in learner.trained.items()}, ""
        except NoGainError as error:
            first = best = training.looks[0]
            learnt, why = {}, error.message
        if not math.isfinite(first.mean):
            return {}, None, "what leaves it is not finite for some of the text held back"
        facts = {"error_before": significant(first.mean), "error": significant(best.mean), "best_step": best.step}
        return learnt, {"layer": number, **facts}, why

    learnt, record, why = workers.broadcast(learn)
    if why:
        learner.ledger.note("untrained", f"layer {number}", why)
    learner.settle(learnt)
    moved = learner.trained.items() if learnt else ()
    coded = {name: item.coded() for name, item in moved if isinstance(item, TrainedMatrix)}
    gains = {name: item.learnt.exp() for name, item in moved if isinstance(item, TrainedNorm)}
    fold_gains(plan, learner.checkpoint, number, gains)
    return RecoveredLayer(coded, gains, record)


class _Measure(NamedTuple):
    """How much errors of what leaves a layer count.

    tokens: weights [windows, length] of mean 1. channels: for each run of them, products [n, n] by which errors at two
    of them count together, of a mean square of 1. None: all alike.
    """

    tokens: Tensor | None = None
    channels: Sequence[Tensor] | None = None

    def error(self, window: int, missed: Tensor, wanted: Tensor) -> Tensor:
        """The mean over tokens of errors [1, length, width] as shares of what was wanted."""
        squares = missed.square().sum(dim=-1) if self.channels is None else self._products(missed)
        shares = squares / wanted.square().sum(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        return (shares if self.tokens is None else shares * self.tokens[window].to(shares.device)).mean()

    def _products(self, missed: Tensor) -> Tensor:
        assert self.channels is not None
        parts = torch.split(missed, [len(products) for products in self.channels], dim=-1)
        pairs = zip(parts, self.channels, strict=True)
        sums = [(part * (part @ products.to(part.device))).sum(dim=-1) for part, products in pairs]
        return torch.stack(sums).sum(dim=0)


def _measure(plan: Plan, number: int, guidance: Guidance) -> _Measure:
    """By what gradients say at the last matrix that adds to the hidden states of a layer, where that is known."""
    last = next(reversed(plan.anatomy.residual(number)[1]), None)
    matrix = next((matrix for matrix in plan.layers[number] if matrix.path == last), None)
    normed = any(RESIDUAL in norm.feeds for norm in plan.spec.norms)  # what it gives, before that is added
    if matrix is None or normed or matrix.path not in guidance.outputs or matrix.space not in guidance.tokens:
        return _Measure()
    products = guidance.outputs[matrix.path]
    mean = float(torch.cat([part.diagonal() for part in products]).mean())
    if not mean > 0:
        return _Measure()
    weights = guidance.tokens[matrix.space].view(-1, plan.recipe.calibration.length)
    return _Measure(weights, [part / mean + DAMPING * torch.eye(len(part)) for part in products])


class LayerLearner:
    """A layer, which holds the values of `coded`, as it learns. trained: by module, or by name of a norm's weight.

    The ledger gets the matrices that are not trained.
    """

    def __init__(
        self,
        plan: Plan,
        number: int,
        layer: nn.Module,
        model: StreamedModel,
        checkpoint: FoldedCheckpoint,
        coded: Mapping[str, Coded],
        ledger: Ledger,
    ) -> None:
        self.plan, self.number, self.layer, self.model, self.checkpoint = plan, number, layer, model, checkpoint
        self.ledger = ledger
        self.trained: dict[str, Trained] = {}
        self.places: list[TrainedPlace] = []
        self._plans: dict[str, MatrixPlan] = {}
        for matrix in plan.layers[number]:
            found = None
            if matrix.recovers and _is_held(layer, matrix.path):
                scale_dtype = DTYPES[matrix.entry.source.dtype]
                found = TrainedMatrix.of(matrix.module, partial(coded.get, matrix.module), scale_dtype, matrix.conv1d)
            if found is None:
                ledger.note("untrained", matrix.module, "its scales are no free numbers, or it is read on demand")
                continue
            self._plans[matrix.module] = matrix
            self._add(matrix.path, matrix.module, found)
        offsets = norm_offsets(plan.spec)
        for path in norms_of(layer):
            name = model.disk_name(number, f"{path}.weight")
            base = checkpoint.unrounded(name).to(torch.float32)
            ones = torch.ones(base.shape, dtype=torch.float64)
            dtype = DTYPES[checkpoint.headers.tensors[name].spec.dtype]
            self._add(path, name, TrainedNorm(base, ones, dtype, offsets.get(path, 0.0)))

    def _add(self, path: str, name: str, item: Trained) -> None:
        self.trained[name] = item
        self.places.append(TrainedPlace(path, name))

    def begin(self, entering: Windows, leaving: Windows, measure: "_Measure", workers: Workers) -> None:
        self._entering, self._leaving, self._measure, self._workers = entering, leaving, measure, workers
        self.model.prepare_batch(1, leaving.shape[1])
        mark(self.layer, self.places)

    def heads(self) -> AbstractContextManager[None]:
        return nullcontext()

    def divergence(self, windows: Sequence[int]) -> float:
        """The mean over tokens of the error of what leaves the layer."""
        self._refresh()
        with torch.no_grad():
            found = self._workers.in_order(lambda window: float(self._error(window, self._read(window))), windows)
            return sum(found) / len(windows)

    def gradients(self, windows: Sequence[int]) -> tuple[float, dict[str, Tensor]]:
        """The same mean, and its gradient at what is learnt."""
        self._refresh()
        total, found = 0.0, dict[str, Tensor]()
        for error, slopes in self._workers.in_order(self._through, windows):
            total += error
            add_slopes(found, slopes)
        for slope in found.values():
            slope /= len(windows)
        return total / len(windows), found

    def settle(self, learnt: Mapping[str, Tensor]) -> None:
        """Give the layer what was learnt, nothing where that is empty."""
        for name, item in self.trained.items():
            item.learnt = learnt[name] if learnt else torch.zeros_like(item.learnt)
        self._refresh()
        for place in self.places:
            weight_at(self.layer, place).requires_grad_(False)

    def _refresh(self) -> None:
        """Give the layer the values of now."""
        for place in self.places:
            item, weight = self.trained[place.name], weight_at(self.layer, place)
            if isinstance(item, TrainedMatrix):
                value = values_of(self._plans[place.name], item.coded())
            else:
                value = item.value()
            weight.data = value.to(weight.device, weight.dtype)  # not in place: the original shares the memory

    def _read(self, window: int) -> Tensor:
        return self._entering.read(slice(window, window + 1)).to(self.model.device)

    def _error(self, window: int, entering: Tensor) -> Tensor:
        left = self._leaving.read(slice(window, window + 1)).to(self.model.device)
        given = self.model.call(self.number, self.layer, entering)
        # without what merely travels with the hidden states to later layers
        wanted, found = (self.model.read_by_head(rows).to(torch.float32) for rows in (left, given))
        return self._measure.error(window, found - wanted, wanted)

    def _through(self, window: int) -> tuple[float, dict[str, Tensor]]:
        total = 0.0

        def run(entering: Tensor) -> tuple[Tensor, None]:
            nonlocal total
            error = self._error(window, entering)
            total = float(error.detach())
            return error, None

        slopes, _ = slopes_of(self.layer, self.places, self.trained, self._read(window), run)
        return total, slopes


def _is_held(layer: nn.Module, path: str) -> bool:
    """Whether a layer has the weight of a module in memory, and does not read it for every product."""
    return has_module(layer, path) and not layer.get_submodule(path).get_parameter("weight").is_meta
