"""Experts that few tokens or none were sent to: which statistics stand in for their own."""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.run.forward import Forward
from llmcompress.engine.run.overflow import refuse_overflow
from llmcompress.engine.run.spilled_inputs import SpilledInputs
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Statistics
from llmcompress.model.experts import Expert, UnfusedExperts
from llmcompress.stats.gram import Gram
from llmcompress.store.statistics import Kept, packed_statistics
from llmcompress.workers import Workers

_LAST = ".down_proj"  # of an expert
STARVED = 4  # tokens per input channel below which an expert's Gram is blended with the layer's


class ExpertInputs:
    """What enters a block of experts before routing: the Gram matrix of all tokens, and an even sample of tokens."""

    def __init__(
        self, path: str, block: UnfusedExperts, device: torch.device, workers: Workers, limit: int = 2048
    ) -> None:
        """path: of the block, below the layer. limit: most tokens of the sample."""
        first: Any = next(iter(block.children()))
        self.path, self._sorted = path, block.layout.sorted
        self.gram = Gram(getattr(first, "up_proj", first).in_features, workers, device, workers.part())
        self._parts: list[Tensor] = []
        self._limit = limit

    def update(self, x: Tensor) -> None:
        """Add the inputs [..., hidden] of a batch."""
        rows = x.reshape(-1, x.shape[-1])
        rows = rows[rows.any(-1)] if self._sorted else rows  # there, zeros are tokens that were sent elsewhere
        self.gram.update(rows)
        self._parts.append(rows[:: max(1, rows.shape[0] // 64)].clone())

    def sample(self) -> Tensor:
        """At most `limit` tokens [tokens, hidden], evenly spread."""
        rows = torch.cat(self._parts)
        return rows[:: max(1, -(-rows.shape[0] // self._limit))]


class ExpertGrams:
    """The Gram matrices of what enters the experts of a stage, each made when its expert is solved."""

    def __init__(
        self,
        path: str | None,
        paths: Mapping[str, str],
        layer: nn.Module,
        forward: Forward,
        device: torch.device,
        before: "ExpertGrams | None" = None,
    ) -> None:
        """path: of the block of experts below the layer; None where nothing says which tokens enter them all.

        paths: by space, a matrix below the layer that reads it. before: those of the stage before this one, where all
        of these experts were among its own (`leads_to`): what they saw then says what they see now.
        """
        self.inputs = SpilledInputs(forward.record("experts" if before is None else "experts-inner"))
        self.before = before
        self.watch: ExpertInputs | None = None
        if before is not None:
            self.watch = before.watch
        elif path is not None:
            block = layer.get_submodule(path)
            assert isinstance(block, UnfusedExperts)
            self.watch = ExpertInputs(path, block, device, forward.workers)
        self._paths, self._workers = paths, forward.workers
        self._layer, self._device, self._dtype = layer, device, forward.model.dtype

    def leads_to(self, paths: Iterable[str]) -> bool:
        """Whether matrices at `paths` are the last ones of experts whose first ones these are."""
        first = {_parent(path) for path in self._paths.values() if not path.endswith(_LAST)}
        experts = {path: self._layer.get_submodule(_parent(path)) for path in paths}
        return all(
            path.endswith(_LAST) and _parent(path) in first and isinstance(expert, Expert)
            for path, expert in experts.items()
        )

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Inputs of the spaces, by what entered the same experts `before`: no layer runs for them."""
        assert self.before is not None
        known = self.before.inputs
        entered = {_parent(path): space for space, path in self.before._paths.items()}
        parts = [(space, _parent(path), entered[_parent(path)]) for space, path in self._paths.items()]
        count = sum(known.chunks(source) for *_, source in parts)
        every = ((space, expert, rows) for space, expert, source in parts for rows in known.read(source))
        mine = islice(every, self._workers.rank, None, self._workers.size)

        def inner(item: tuple[str, str, Tensor]) -> dict[str, Tensor]:
            space, path, rows = item
            expert: Any = self._layer.get_submodule(path)
            return {space: expert.inner(rows.to(self._device))}

        return self._workers.interleave_ranks(self._workers.in_order(inner, mine), count)

    def of(self, plan: MatrixPlan, ledger: Ledger, workers: Workers) -> Gram:
        """That of the input of a matrix as it multiplies it, with what an expert with few tokens borrows."""
        gram = self.inputs.gram(plan.space, plan.entry.in_features, workers, self._device, plan.entry.inputs)
        refuse_overflow(plan.module, [gram], self._dtype, routed=True)
        if gram.dropped:
            ledger.note("nonfinite_inputs", plan.module, f"{gram.dropped} tokens left out of its statistics")
        if self.watch is not None:
            blend_starved(gram, plan, self.watch, self._layer, ledger, workers)
        return gram


class StageStatistics:
    """The statistics of the inputs of a stage. found: by space; experts: makes the Gram matrices that it lacks."""

    def __init__(
        self,
        found: Mapping[str, Statistics],
        experts: ExpertGrams | None = None,
        plans: Mapping[str, MatrixPlan] | None = None,
    ) -> None:
        """plans: by space, a matrix that reads it, where there are experts."""
        self._found, self.experts, self._plans = found, experts, plans or {}

    def of(self, space: str, ledger: Ledger, workers: Workers) -> Statistics | None:
        """What is known of an input. A Gram matrix is the caller's: it is made anew for each call."""
        known = self._found.get(space)
        if known is None or self.experts is None:
            return known
        return Statistics({**known.found, "gram": self.experts.of(self._plans[space], ledger, workers)})

    def packed(self, workers: Workers) -> dict[str, Tensor]:
        """The tensors to store for them."""
        tensors: dict[str, Tensor] = {}
        for space in self._found:
            known = self.of(space, Ledger(), workers)
            tensors |= {} if known is None else packed_statistics({space: known})
        return tensors


class KeptStageStatistics(StageStatistics):
    """The statistics of the inputs of a stage, as another run has kept them: each is read when it is asked for."""

    def __init__(self, kept: Kept, number: int, device: torch.device) -> None:
        super().__init__({})
        self._kept, self._number, self._device = kept, number, device

    def of(self, space: str, ledger: Ledger, workers: Workers) -> Statistics | None:
        return self._kept.read(self._number, space, self._device)


def _parent(path: str) -> str:
    """The path of the module that a matrix belongs to."""
    return path.rpartition(".")[0]


def blend_starved(
    gram: Gram, plan: MatrixPlan, watch: ExpertInputs, layer: nn.Module, ledger: Ledger, workers: Workers
) -> None:
    """Shrink the Gram matrix of an expert with too few tokens towards a prior from all tokens that entered the block.

    For gate and up the prior is the Gram matrix of the block's input. For down it is that of a sample of the block's
    input, pushed through the expert whatever the router says: both priors lie in the space that the matrix reads.
    """
    needed = STARVED * gram.size
    seen = gram.tokens
    if seen >= needed:
        return
    prior = watch.gram
    if plan.path.endswith(_LAST):
        expert = layer.get_submodule(_parent(plan.path))
        assert isinstance(expert, Expert)
        prior = Gram(gram.size, workers, gram.sum.device)
        with torch.no_grad():
            prior.update(expert.inner(watch.sample()))
    gram.shrink_towards(prior.finish(), float(needed - seen))
    ledger.note(
        "starved_expert", plan.module, f"{seen} tokens for {gram.size} inputs: blended with the layer's statistics"
    )


def lend_ranges(found: Mapping[str, Statistics], needing: Mapping[str, list[MatrixPlan]], ledger: Ledger) -> None:
    """Give experts that no token was sent to the range of the same matrix of all other experts.

    Where the inputs' scales have a divisor all experts get that range, as engines keep one divisor for all of them.
    """
    ranges = {space: needing[space][0].method.input_range(statistics) for space, statistics in found.items()}
    totals: dict[str, Any] = {}  # by the last name of the matrices, before anything is lent
    for space, seen in ranges.items():
        leaf = _leaf(needing[space][0])
        if seen is not None and seen.tokens:
            if leaf in totals:
                totals[leaf].merge(seen)
            else:
                totals[leaf] = deepcopy(seen)
    for space, seen in ranges.items():
        plan = needing[space][0]
        shared = plan.expert is not None and plan.method.divided_inputs
        total = totals.get(_leaf(plan))
        if seen is None or total is None:
            continue
        if not seen.tokens:
            seen.merge(total)
            ledger.note("starved_expert", plan.module, "no tokens: the range of its inputs is that of all experts")
        elif shared:
            seen.merge(total)  # maxima, so that its own count once


def _leaf(plan: MatrixPlan) -> str:
    """The last name of a matrix' path: `down_proj`."""
    return plan.path.rpartition(".")[2]
