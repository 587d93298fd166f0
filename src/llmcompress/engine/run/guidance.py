"""What errors in a matrix's outputs do to the prediction, token by token and output by output, from one pass backwards.

GuidedQuant (arXiv:2505.07004, section 3): to second order, the divergence that an error in a matrix's output at a token
causes is the error squared, times the squared gradient of the log-likelihood there. Here each token has one weight, a
power of the mean of those squares over the outputs of all matrices that read one input, so that these still share one
Gram matrix. What errors of several outputs do together is told by the mean products of gradients at two outputs each
(`solve/output_feedback.py`).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmcompress.calib.base import fingerprint
from llmcompress.engine.plan.estimate import gradient_windows
from llmcompress.engine.plan.matrix_plan import MatrixPlan, followed
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.process.progress import Progress
from llmcompress.engine.run.gradient_pass import RECORDED, FinishedLayers, fisher_information
from llmcompress.engine.run.kept_statistics import about_gradients
from llmcompress.engine.run.opened_model import opened_model
from llmcompress.errors import RunError, StoppedError
from llmcompress.solve.output_feedback import chunks
from llmcompress.stats.fisher import Fisher
from llmcompress.stats.gram import add_products, products_of, symmetric_mean, upper_panels
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.staging import Staging
from llmcompress.store.statistics import finished_entry, kept_statistics, statistics_entry
from llmcompress.workers import Workers

POWER = 0.5
"""Of the mean squares. With 1 a few tokens outweigh all others, and what is fitted to them serves no other text."""

_TOKENS, _OUTPUTS = "tokens.", "outputs."  # what names in files begin with


class Guidance(NamedTuple):
    """What is known of a layer. tokens: weights [samples * length] by space, of mean 1; 1 in windows without gradients.

    outputs: by path of a matrix, the mean products [n, n] of gradients at each of its `chunks` of outputs.
    """

    tokens: Mapping[str, Tensor]
    outputs: Mapping[str, Sequence[Tensor]]


NONE = Guidance({}, {})
GuidancePart = tuple[Tensor, list[Tensor]]
"""Of a window: squares of gradients [tokens], summed over outputs, and products at each chunk of outputs."""


def measured_guidance(
    plan: Plan,
    checkpoint: Checkpoint,
    tokens: Tensor,
    staged: Staging,
    progress: Progress,
    stop: Callable[[], bool],
    workers: Workers,
) -> Callable[[int], Guidance]:
    """By number of a section, what the gradients of `tokens` [samples, length] say.

    Spaces are absent that have no weights: all of a run that asks for none, those of experts, whose tokens come in the
    order in which they are sent there, and those whose matrices do not run once for every token. Matrices are absent
    that are not `followed`. Rank 0 runs the gradients of the source's own predictions back, of the windows that
    `gradient_windows` names, and keeps what it finds in the work directory, and with `--stats` for other runs.
    StoppedError when `stop` says so between two layers; the next start goes on there.
    """
    if not plan.follows_gradients:
        return lambda number: NONE

    def measure() -> str | None:
        """Where an earlier run has kept all layers; None where they are in this run's work directory."""
        about, stats = about_guidance(plan, tokens), plan.options.stats
        kept = None if stats is None else statistics_entry(stats, about)
        found = kept if kept is not None and kept.complete else finished_entry(beside(plan.work), about)
        if found is not None:
            return str(found.path)
        finished, layers = _FinishedGuidance(plan, staged, tokens.shape), range(len(plan.layers))
        missing = [number for number in layers if not finished.has(number)]
        if missing:
            if missing[-1] >= len(missing) or not any(name.startswith(RECORDED) for name in staged.folder.names()):
                staged.remove_guidance(layers)  # a file was taken away, and with it what a pass would go on from
            model = opened_model(checkpoint, plan.spec, plan.dtype, plan.options, tiled_attention=False)
            steps = 2 * len(plan.layers) + 1

            def watch(done: int) -> None:
                progress.gradients(done, steps)
                if done < steps and stop():
                    raise StoppedError(
                        f"stopped at a safe point, {done} of {steps} steps of the gradients done",
                        f"run the same command again to go on; finished work is in {plan.work}",
                    )

            paths = [list(weighed_paths(plan.layers[number])) for number in layers]
            fisher_information(
                model,
                tokens[list(gradient_windows(*tokens.shape))],
                paths,
                plan.recipe.calibration.seed,
                staged.folder,
                workers.without_ranks(),
                watch,
                lambda number, _: finished.gathering(number),
                finished,
                outside=False,
            )
        for name in staged.folder.names():
            if name.startswith(RECORDED):
                (staged.folder / name).unlink()
        if kept is not None:
            for number in layers:
                kept.write(number, staged.read_guidance(number))
        return None

    place = workers.broadcast(measure)
    read = staged.read_guidance if place is None else kept_statistics(Path(place)).tensors
    return lambda number: _read(read(number)) if number < len(plan.layers) else NONE


def about_guidance(plan: Plan, tokens: Tensor) -> dict[str, Any]:
    """What a store says of what gradients say of a plan's model and text, tokens [samples, length]."""
    watched = [
        {"spaces": weighed_paths(plan.layers[number]), "followed": sorted(_followed(plan, number))}
        for number in range(len(plan.layers))
    ]
    windows = len(gradient_windows(*tokens.shape))
    return about_gradients(plan, fingerprint(tokens), windows, watched)


def beside(work: Path) -> Path:
    """The store in which losses that are measured before a run leave what gradients say. work: of the run."""
    return work.with_name(f"{work.name}.guidance")


def _followed(plan: Plan, number: int) -> set[str]:
    """Paths of the matrices of a layer of whose outputs the products of gradients are wanted."""
    return {matrix.path for matrix in followed(plan.recipe, plan.layers[number])}


def _read(tensors: Mapping[str, Tensor]) -> Guidance:
    """What the file of a layer says."""
    outputs: dict[str, list[Tensor]] = {}
    for name in sorted(name for name in tensors if name.startswith(_OUTPUTS)):
        outputs.setdefault(name.removeprefix(_OUTPUTS).rpartition(".")[0], []).append(tensors[name])
    tokens = {name.removeprefix(_TOKENS): value for name, value in tensors.items() if name.startswith(_TOKENS)}
    return Guidance(tokens, outputs)


def weighed_paths(layer: Iterable[MatrixPlan]) -> dict[str, str]:
    """The space of each matrix of a layer, by its path, for matrices by whose gradients tokens are weighed."""
    return {matrix.path: matrix.space for matrix in layer if matrix.follows_gradients and matrix.expert is None}


def layer_guidance(plan: Plan, number: int, shape: Sequence[int]) -> "LayerGuidance":
    """What gathers what gradients say of a layer. shape: of the tokens [samples, length]."""
    return LayerGuidance(weighed_paths(plan.layers[number]), _followed(plan, number), shape)


class _FinishedGuidance(FinishedLayers):
    """The layers whose guidance is in the work directory."""

    def __init__(self, plan: Plan, staged: Staging, shape: Sequence[int]) -> None:
        """shape: of the tokens [samples, length]."""
        self.plan, self.staged, self.shape = plan, staged, shape
        self._gathering: dict[int, LayerGuidance] = {}

    def gathering(self, number: int) -> "LayerGuidance":
        self._gathering[number] = layer_guidance(self.plan, number, self.shape)
        return self._gathering[number]

    def seed(self, name: str) -> int:
        return self.staged.seed(name)

    def has(self, layer: int) -> bool:
        return self.staged.has_guidance(layer)

    def add(self, layer: int) -> None:
        self.staged.write_guidance(layer, self._gathering.pop(layer).tensors())


class LayerGuidance:
    """What gradients say of a layer.

    Of every token the sum of squares over the outputs of the matrices that read one space, and the products at two
    outputs of a matrix, summed over tokens. A `FisherSum` of which nothing else is left. spaces: by path of a matrix.
    followed: paths of those whose products are wanted. shape: of the tokens [samples, length]; windows are numbered
    among those that gradients are of.
    """

    def __init__(self, spaces: Mapping[str, str], followed: Collection[str], shape: Sequence[int]) -> None:
        self._spaces, self._followed = spaces, followed
        self._samples, self._length = shape
        self._windows = list(gradient_windows(self._samples, self._length))
        self._sums = {space: torch.zeros(len(self._windows), self._length) for space in spaces.values()}
        self._products: dict[str, list[Tensor]] = {}
        self._seen: dict[str, int] = {}

    def part(self, path: str, x: Tensor, gradient: Tensor, window: int) -> GuidancePart:
        """Of a window's gradients [..., out]. Of products the upper triangle counts; of matrices that are not followed
        there are none."""
        rows = gradient.reshape(-1, gradient.shape[-1])
        products = [_products(rows[:, some]) for some in chunks(rows.shape[1])] if path in self._followed else []
        return rows.to(torch.float32).square().sum(dim=-1).cpu(), products

    def weighs(self, path: str) -> bool:
        """Whether gradients at the outputs of a matrix are wanted."""
        return path in self._spaces

    def add(self, path: str, part: GuidancePart, window: int) -> None:
        squares, products = part
        space = self._spaces[path]
        if squares.numel() != self._length:
            self._sums.pop(space, None)
        elif space in self._sums:
            self._sums[space][window] += squares
        if path in self._followed:
            self._seen[path] = self._seen.get(path, 0) + squares.numel()
            sums = self._products.setdefault(path, products)
            if sums is not products:
                for total, product in zip(sums, products, strict=True):
                    total += product

    def finish(self, blind: Collection[str]) -> dict[str, Fisher]:
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Weights and products by the names that files have for them. RunError for gradients that are not finite."""
        for path, sums in self._products.items():
            if not all(bool(torch.isfinite(total).all()) for total in sums):
                raise _not_finite(path)
        products = {
            f"{_OUTPUTS}{path}.{number:05d}": symmetric_mean(total, self._seen[path])
            for path, sums in self._products.items()
            for number, total in enumerate(sums)
        }
        return {f"{_TOKENS}{space}": weights for space, weights in self.weights().items()} | products

    def weights(self) -> dict[str, Tensor]:
        """The weights [samples * length] of each space, of mean 1. RunError for gradients that are not finite."""
        found = {}
        for space, sums in self._sums.items():
            powers = sums.flatten().to(torch.float64) ** POWER
            mean = float(powers.mean())
            if not torch.isfinite(powers).all():
                raise _not_finite(space)
            if mean > 0:  # else no output of these matrices matters, and all tokens count alike
                weights = torch.ones(self._samples, self._length)
                weights[self._windows] = (powers / mean).to(torch.float32).view(sums.shape)
                found[space] = weights.flatten()
        return found


def _products(rows: Tensor) -> Tensor:
    """rows^T rows [n, n] in float32, of rows [tokens, n]; what lies below the panels of the upper triangle is zero."""
    count = rows.shape[1]
    found = torch.zeros(count, count, device=rows.device)
    for part in products_of(rows, exact=True):
        for panel in upper_panels(found):
            start = count - panel.shape[1]
            add_products(panel, part[:, start : start + panel.shape[0]], part[:, start:])
    return found.cpu()


def _not_finite(name: str) -> RunError:
    return RunError(f"the gradients of {name} are not finite", "look at its weights, and at config.json")
