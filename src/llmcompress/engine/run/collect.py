"""Statistics of the inputs of a layer's matrices, over all calibration tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmcompress.engine.process.progress import Progress
from llmcompress.engine.run.forward import Forward
from llmcompress.errors import RunError
from llmcompress.methods.base import Statistics
from llmcompress.stats.absmax import AbsMax
from llmcompress.stats.drift import Drift
from llmcompress.stats.energy import Energy, energy
from llmcompress.stats.gram import Gram
from llmcompress.stats.magnitudes import Magnitudes
from llmcompress.stats.panels import complete
from llmcompress.workers import Workers

if TYPE_CHECKING:
    from llmcompress.engine.plan.matrix_plan import MatrixPlan
    from llmcompress.grids.inputs import Seen


def collect(
    compressed: Forward,
    original: Forward | None,
    wanted: "Mapping[str, Sequence[MatrixPlan]]",
    device: torch.device,
    progress: Progress,
    watch: "ExpertInputs | None" = None,
) -> dict[str, Statistics]:
    """Statistics of each space in `wanted` (space to the matrices that read it); `watch` sees what enters the experts.

    A space has a Gram matrix where a method solves by one, a range where its scale is fixed, peaks where outliers are
    looked for, squares where a pruner goes by no more. Experts have no drift, since the two models may send a token to
    different ones.
    """
    workers = compressed.workers
    paths = {space: plans[0].path for space, plans in wanted.items()}
    routed = any(plan.expert is not None for plans in wanted.values() for plan in plans)
    grams = {
        space: Gram(plans[0].entry.in_features, workers, device, workers.part(number))
        for number, (space, plans) in enumerate(wanted.items())
        if any(plan.needs_gram for plan in plans)
    }
    squares = {
        space: Energy.none(plans[0].entry.in_features)
        for space, plans in wanted.items()
        if space not in grams and any(plan.needs_energy for plan in plans)
    }
    ranges = {
        space: _range(plan, device) for space, plans in wanted.items() for plan in plans if plan.method.fixed_inputs
    }
    peaks = {
        space: AbsMax(plans[0].entry.in_features, device)
        for space, plans in wanted.items()
        if any(plan.method.needs_peaks for plan in plans)
    }
    paired = None if routed else original
    drifting = grams if paired is not None else {}
    drifts = {space: Drift(gram.size, workers, device, workers.part()) for space, gram in drifting.items()}
    others = paired.inputs(paths) if paired is not None else iter(())
    watched = {watch.path: watch.path} if watch is not None else {}
    for number, here in enumerate(compressed.inputs({**watched, **paths})):
        if watch is not None:
            watch.update(here.pop(watch.path))
        if paired is not None and number == paired.batches:  # the original stream ends here
            complete(list(grams.values()), workers)
            for space, drift in drifts.items():
                drift.hessian = grams[space].mean()
        there = next(others, None)
        for space in paths:
            if space in here:
                if space in grams:
                    grams[space].update(here[space])
                if space in squares:
                    squares[space] = squares[space].plus(energy(here[space]))
                if space in ranges:
                    ranges[space].update(here[space] if routed else by_window(here[space], compressed.length))
                if space in peaks:
                    peaks[space].update(here[space].flatten(0, -2))  # all tokens: the first has the largest outliers
            elif not routed:
                raise RunError(f"a layer never reached {space}", "its declaration has another order")
        for space, drift in drifts.items():
            if there is not None:
                drift.update(there[space], here[space])
        progress.tokens(sum(x.numel() // x.shape[-1] for x in here.values()))
    for _ in others:
        raise RunError("the original stream has more windows than the compressed one")
    complete([*grams.values(), *drifts.values(), *([] if watch is None else [watch.gram])], workers)
    return {
        space: Statistics(
            grams.get(space),
            drifts.get(space),
            range=ranges.get(space),
            peaks=peaks.get(space),
            squares=squares.get(space),
        )
        for space in wanted
    }


def outputs_and_energy(forward: Forward, spaces: Mapping[str, str], found: dict[str, Energy]) -> Iterator[Tensor]:
    """What leaves a layer, batch by batch; `found` gathers the energy of `spaces` (see `Forward.inputs`) meanwhile."""
    for seen, left in forward.summaries_and_outputs(spaces, energy):
        for space, more in seen.items():
            found[space] = found[space].plus(more) if space in found else more
        yield left


def _range(plan: "MatrixPlan", device: torch.device) -> "Seen":
    """What a fixed scale is found by."""
    return AbsMax(plan.entry.in_features, device) if plan.method.activation_clip == "absmax" else Magnitudes(device)


def by_window(x: Tensor, length: int) -> Tensor:
    """Inputs [windows, length, in]: some families join the windows before they multiply."""
    return x.reshape(-1, length, x.shape[-1])


class ExpertInputs:
    """What enters a block of experts, whatever the routing: the Gram of all tokens, and an even sample of them."""

    def __init__(self, path: str, block: nn.Module, device: torch.device, workers: Workers, limit: int = 2048) -> None:
        """path: of the block, below the layer."""
        first: Any = next(iter(block.children()))
        self.path = path
        self.gram = Gram(first.gate_proj.in_features, workers, device, workers.part())
        self._parts: list[Tensor] = []
        self._limit = limit

    def update(self, x: Tensor) -> None:
        """Add the inputs [..., hidden] of a batch."""
        self.gram.update(x)
        rows = x.reshape(-1, x.shape[-1])
        self._parts.append(rows[:: max(1, rows.shape[0] // 64)].clone())

    def sample(self) -> Tensor:
        """At most `limit` tokens [tokens, hidden], evenly spread."""
        rows = torch.cat(self._parts)
        return rows[:: max(1, -(-rows.shape[0] // self._limit))]


def stages_of(plans: "Sequence[MatrixPlan]") -> "list[list[MatrixPlan]]":
    """Matrices of a layer that are solved on statistics of one pass, in order of execution.

    Those that read one space stand together; all experts' inputs come from one pass, then all their hidden states.
    """
    stages: dict[str, list[MatrixPlan]] = {}
    for plan in plans:
        key = plan.space if plan.expert is None else plan.space.rpartition(".")[0]
        stages.setdefault(key, []).append(plan)
    return list(stages.values())
