"""Statistics of the inputs of a layer's matrices, over all calibration tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmcompress import stats
from llmcompress.engine.process.progress import Progress
from llmcompress.engine.run.forward import Forward
from llmcompress.engine.run.installed import seen_at
from llmcompress.engine.run.overflow import refuse_overflow
from llmcompress.engine.run.starved_experts import ExpertGrams
from llmcompress.errors import RunError
from llmcompress.grids.inputs import foreseen
from llmcompress.methods.base import Statistics
from llmcompress.registry import discover
from llmcompress.stats.energy import Energy, energy
from llmcompress.stats.panels import Panelled, complete
from llmcompress.stats.statistic import Accumulator, Counted, PairedAccumulator, PairedStatistic
from llmcompress.workers import Workers

if TYPE_CHECKING:
    from llmcompress.engine.plan.matrix_plan import MatrixPlan


class SpaceStatistics:
    """The accumulators of one input: of the statistics that the steps of the matrices which read it need."""

    def __init__(
        self,
        plans: "Sequence[MatrixPlan]",
        workers: Workers,
        device: torch.device,
        turn: int,
        paired: bool,
        later: frozenset[str] = frozenset(),
        weights: Tensor | None = None,
    ) -> None:
        """turn: number of the space, so that ranks take turns in shared sums. paired: whether both models run.

        later: names of the statistics that are not gathered now. weights: of all tokens [tokens], as they count in
        Gram matrices and drift; None for all alike.
        """
        known = discover(stats, "STATISTIC")
        needs = frozenset[str]().union(*(plan.needs for plan in plans)) - later
        size, part = plans[0].entry.in_features, workers.part(turn)
        chosen = [known[name] for name in sorted(needs) if known[name].unless not in needs]
        beside = [item for item in known.values() if isinstance(item, PairedStatistic) and item.beside in needs]
        self._multiplied = {item.name for item in chosen if item.multiplied}
        self._rounding = plans[0].entry.inputs
        self._roots = None if weights is None else weights.sqrt().to(device)
        self._tokens = 0  # that were added
        self._by_window = {item.name for item in chosen if item.by_window}
        self.alone: dict[str, Accumulator] = {item.name: item.make(size, workers, device, part) for item in chosen}
        self.paired: dict[str, PairedAccumulator] = {
            item.name: item.make(size, workers, device, part) for item in (beside if paired else [])
        }
        self._beside = {item.name: item.beside for item in beside}

    def update(self, x: Tensor, original: Tensor | None, length: int | None) -> None:
        """Add an input. original: that of the uncompressed model for the same tokens, unless its windows have ended.

        length: tokens of a window; None where windows cannot be told.
        """
        counted = self._weighed(self.multiplied(x)) if self._multiplied or self.paired else x
        for name, accumulator in self.alone.items():
            seen = counted if name in self._multiplied else x
            accumulator.update(by_window(seen, length) if length and name in self._by_window else seen)
        if original is not None:
            for pair in self.paired.values():
                pair.update(self._weighed(original), counted)
        self._tokens += x.numel() // x.shape[-1]

    def multiplied(self, x: Tensor) -> Tensor:
        """An input as matrices will multiply it: rounded, where their inputs will be."""
        return foreseen(x, self._rounding)

    def _weighed(self, x: Tensor) -> Tensor:
        """The next tokens [..., in] times the roots of their weights."""
        if self._roots is None:
            return x
        rows = x.reshape(-1, x.shape[-1])
        roots = self._roots[self._tokens : self._tokens + rows.shape[0], None]
        # bfloat16 holds what float32 does; float16 may not
        return (rows * roots).to(rows.dtype if rows.dtype == torch.bfloat16 else torch.float32)

    def original_ended(self) -> None:
        for name, pair in self.paired.items():
            pair.original_ended(self.alone[self._beside[name]])

    def shared_sums(self) -> list[Panelled]:
        """Those accumulators of which each rank adds up a part."""
        return [item for item in (*self.alone.values(), *self.paired.values()) if isinstance(item, Panelled)]


def collect(
    compressed: Forward,
    original: Forward | None,
    wanted: "Mapping[str, Sequence[MatrixPlan]]",
    device: torch.device,
    progress: Progress,
    experts: ExpertGrams | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> dict[str, Statistics]:
    """Statistics of each space in `wanted` (space to the matrices that read it).

    experts: takes the inputs that Gram matrices will be made of, which are then not among the statistics. weights: of
    all tokens [tokens], by space, where they do not count alike.
    Experts have no paired statistics, since the two models may send a token to different experts.
    """
    workers = compressed.workers
    paths = {space: seen_at(compressed.stream.layer, plans) for space, plans in wanted.items()}
    routed = any(plan.expert is not None for plans in wanted.values() for plan in plans)
    paired, later = None if routed else original, frozenset(() if experts is None else {"gram"})
    known = {
        space: SpaceStatistics(plans, workers, device, number, paired is not None, later, (weights or {}).get(space))
        for number, (space, plans) in enumerate(wanted.items())
    }
    originals = paired.inputs(paths) if paired is not None else iter(())
    follows = experts is not None and experts.before is not None
    watch = None if experts is None or follows else experts.watch
    watched = {watch.path: watch.path} if watch is not None else {}
    batches = experts.batches() if experts is not None and follows else compressed.inputs({**watched, **paths})
    for number, here in enumerate(batches):
        if watch is not None:
            watch.update(here.pop(watch.path))
        if paired is not None and number == paired.batches:
            _original_ended(list(known.values()), workers)
        there = next(originals, None)
        if not routed:
            refuse_missing(paths, here)
        if experts is not None:
            experts.inputs.append(here)
        for space, x in here.items():
            known[space].update(x, None if there is None else there[space], None if routed else compressed.length)
        progress.tokens(sum(x.numel() // x.shape[-1] for x in here.values()))
    for _ in originals:
        raise RunError("the original stream has more windows than the compressed one")
    if experts is not None:
        experts.inputs.finish()
    sums = [item for space in known.values() for item in space.shared_sums()]
    complete(sums if watch is None else [*sums, watch.gram], workers)
    for space, item in known.items():
        accumulators: list[Counted] = [*item.alone.values(), *item.paired.values()]
        refuse_overflow(wanted[space][0].module, accumulators, compressed.model.dtype, routed)
    return {space: Statistics({**item.alone, **item.paired}) for space, item in known.items()}


def _original_ended(spaces: Sequence[SpaceStatistics], workers: Workers) -> None:
    """The compressed stream goes on alone: paired statistics keep what they want of those beside them."""
    complete([item for space in spaces for item in space.alone.values() if isinstance(item, Panelled)], workers)
    for space in spaces:
        space.original_ended()


def refuse_missing(paths: Mapping[str, str], inputs: Mapping[str, Tensor]) -> None:
    """RunError where a pass did not reach one of the spaces `paths`."""
    for space in paths:
        if space not in inputs:
            raise RunError(f"a layer never reached {space}", "its declaration has another order")


def outputs_with_energy(forward: Forward, spaces: Mapping[str, str], found: dict[str, Energy]) -> Iterator[Tensor]:
    """What leaves a layer, batch by batch; `found` gathers the energy of `spaces` (see `Forward.inputs`) meanwhile."""
    for seen, left in forward.summaries_and_outputs(spaces, energy):
        for space, more in seen.items():
            found[space] = found[space].plus(more) if space in found else more
        yield left


def by_window(x: Tensor, length: int) -> Tensor:
    """Inputs [windows, length, in]: some families join the windows before they multiply."""
    return x.reshape(-1, length, x.shape[-1])


def stages_of(plans: "Sequence[MatrixPlan]") -> "list[list[MatrixPlan]]":
    """Matrices of a layer that are solved on statistics of one pass, in order of execution.

    Those that read one space stand together; all experts' inputs come from one pass, then all their hidden states.
    """
    stages: dict[str, list[MatrixPlan]] = {}
    for plan in plans:
        key = plan.space if plan.expert is None else plan.space.rpartition(".")[0]
        stages.setdefault(key, []).append(plan)
    return list(stages.values())
