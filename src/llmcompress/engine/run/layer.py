"""Compressing one layer, stage by stage: each stage is measured on what the compressed stages before it give."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.process.process_memory import large_tensors_kept, return_freed_memory
from llmcompress.engine.process.progress import Progress
from llmcompress.engine.process.ranks import device_of
from llmcompress.engine.run.collect import collect, stages_of
from llmcompress.engine.run.forward import Forward
from llmcompress.engine.run.guidance import NONE, Guidance
from llmcompress.engine.run.input_scales import input_scale
from llmcompress.engine.run.installed import install, seen_at
from llmcompress.engine.run.kept_statistics import note_reuse
from llmcompress.engine.run.kv_ranges import largest_magnitudes
from llmcompress.engine.run.layer_recovery import LayerLearner, recovered_layer
from llmcompress.engine.run.matrix_record import matrix_record, recovered_record, refuse_extremes
from llmcompress.engine.run.pruning import pruned_group, sparsity_record
from llmcompress.engine.run.recoding import kept_together, recoded
from llmcompress.engine.run.starved_experts import ExpertGrams, KeptStageStatistics, StageStatistics, lend_ranges
from llmcompress.engine.source.gguf_input import GgufHeaders
from llmcompress.engine.source.quantised import DecodedHeaders
from llmcompress.errors import RunError
from llmcompress.formats.gguf.tensors import multiplied
from llmcompress.grids.coded import Coded
from llmcompress.ledger import Ledger, LedgerEntry
from llmcompress.methods.base import Solved, Statistics
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.solve.column_sweep import Sweeper
from llmcompress.solve.lookups import with_lookups
from llmcompress.solve.row_blocks import RowBlocks
from llmcompress.store.checkpoint import DTYPES, Checkpoint
from llmcompress.store.folds import FoldedCheckpoint
from llmcompress.store.statistics import Kept
from llmcompress.store.windows import write_windows
from llmcompress.workers import Workers

_EXPERTS_OF_A_THREAD = 4  # solved before freed memory goes back to the system
Result = tuple[list[Coded], list[dict[str, Any]], list[dict[str, str]]]  # codes, records and notes of a group


class SolvedLayer(NamedTuple):
    """coded: codes by on-disk module name. records: {"linears": [...], "ledger": [...], ...}, for the report.

    gains: by name of a norm's weight, what its gains are multiplied by.
    """

    coded: dict[str, Coded]
    records: dict[str, Any]
    gains: Mapping[str, Tensor]


class Compressor:
    """Chooses the codes of the matrices of a layer, and puts their decoded values into the layer."""

    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint,
        model: StreamedModel | None,
        progress: Progress,
        sweeper: Sweeper | None,
        known: Kept | None = None,
        keeping: Kept | None = None,
        guidance: Callable[[int], Guidance] = lambda number: NONE,
    ) -> None:
        """sweeper: what decides blocks of columns on the run's device; None for torch.

        known: stored statistics that are used instead of text. keeping: where gathered statistics are stored. guidance:
        what gradients say, by the number of a section.
        """
        self.plan, self.checkpoint, self.model, self.progress = plan, checkpoint, model, progress
        self.sweeper, self.known, self.keeping, self.guidance = sweeper, known, keeping, guidance
        self.device = device_of(plan.options.device)
        self.rounded = isinstance(plan.headers, DecodedHeaders | GgufHeaders)

    def layer(
        self,
        number: int,
        workers: Workers,
        layer: nn.Module | None = None,
        compressed: Forward | None = None,
        original: Forward | None = None,
    ) -> SolvedLayer:
        """The codes of a section's matrices. layer: the module of a layer that text runs through, which gets them."""
        coded: dict[str, Coded] = {}
        linears: list[dict[str, Any]] = []
        ledger = Ledger()
        guidance = self.guidance(number)
        if self.known is not None:
            note_reuse(self.plan, self.known, ledger)
        recovers = any(plan.recovers for plan in self.plan.sections[number])
        onward = recovers or number + 1 < len(self.plan.sections)
        for plan, solved, record in self._chosen(
            number, workers, layer, compressed, original, onward=onward, guidance=guidance, ledger=ledger
        ):
            coded[plan.module] = solved
            linears.append(record)
            self.progress.matrix(record)
            if layer is not None and plan.inside:  # nothing reads what leaves the head
                install(layer, plan, solved)
        gains: Mapping[str, Tensor] = {}
        records: dict[str, Any] = {"linears": linears}
        if recovers:
            self.progress.stage("scales and gains", len(coded))
            gains = self._recover(number, layer, compressed, original, coded, records, guidance, ledger, workers)
        records["ledger"] = ledger.as_json()
        inside = number < len(self.plan.layers)
        if compressed is not None and inside and self.plan.recipe.kv_cache is not None:
            records["kv_cache"] = largest_magnitudes(compressed.key_value_range(), number)
        return SolvedLayer(coded, records, gains)

    def _chosen(
        self,
        number: int,
        workers: Workers,
        layer: nn.Module | None,
        compressed: Forward | None,
        original: Forward | None,
        *,
        onward: bool,
        guidance: Guidance,
        ledger: Ledger,
    ) -> Iterator[tuple[MatrixPlan, Coded, dict[str, Any]]]:
        """The matrices of a section, stage by stage; each is to be in the layer before the next is asked for.

        onward: whether anything asks for what leaves the layer as it was. Statistics are freed with the last matrix.
        """
        gathered: dict[str, Tensor] = {}
        stages = stages_of(self.plan.sections[number])
        paired = 1 + max((at for at, stage in enumerate(stages) if stage[0].expert is None), default=-1)
        before: ExpertGrams | None = None
        beside = original  # while the stages need it
        for number_of_stage, stage in enumerate(stages):
            self.progress.stage(stage[0].space, len(stage))
            kept = [
                found
                for plan in stage
                if (found := recoded(plan, self.plan.format, self.checkpoint, ledger, workers)) is not None
            ]
            kept = kept_together(stage, kept, ledger)
            taken = {plan.module for plan, *_ in kept}
            stage = [plan for plan in stage if plan.module not in taken]
            if beside is not None and number_of_stage >= paired:
                beside.conclude(onward=onward)
                beside = None
            with windows_under_way(self.plan):
                statistics = (
                    KeptStageStatistics(self.known, number, self.device)
                    if self.known is not None
                    else self._statistics(layer, compressed, beside, stage, before, guidance.tokens, ledger)
                )
            if self.keeping is not None:
                gathered |= statistics.packed(workers)
            return_freed_memory()  # what the windows took, before the matrices of the solvers come
            yield from kept
            groups = _solved_as_one(stage, apart=self.plan.importance is not None)
            yield from self._solutions(groups, statistics, guidance, ledger, workers)
            before = statistics.experts or before
        if self.keeping is not None:
            self.keeping.write(number, gathered)

    def _recover(
        self,
        number: int,
        layer: nn.Module | None,
        compressed: Forward | None,
        original: Forward | None,
        coded: dict[str, Coded],
        records: dict[str, Any],
        guidance: Guidance,
        ledger: Ledger,
        workers: Workers,
    ) -> Mapping[str, Tensor]:
        """Fit scales and gains of a layer, whose codes and records become those of now; the factors of gains."""
        assert layer is not None
        assert compressed is not None
        assert original is not None
        assert self.model is not None
        assert isinstance(self.checkpoint, FoldedCheckpoint)
        errors = [record["relative_error"] for record in records["linears"]]
        leaving = None
        if workers.rank == 0:
            leaving = write_windows(original.outputs(), original.record("wanted"), self.model.dtype)
        else:
            deque(original.outputs(), maxlen=0)
        return_freed_memory()  # what the solvers and windows took, before gradients come
        learner = LayerLearner(self.plan, number, layer, self.model, self.checkpoint, coded, ledger)
        found = recovered_layer(learner, errors, compressed.stream.hidden, leaving, guidance, workers)
        compressed.renew()
        coded |= found.coded
        if found.record is not None:
            records["recovery"] = found.record
        plans = {plan.module: plan for plan in self.plan.sections[number]}
        records["linears"] = [
            recovered_record(record, self._weight(plans[module]), found.coded[module].to(self.device))
            if (module := record["name"]) in found.coded
            else record
            for record in records["linears"]
        ]
        return found.gains

    def _solutions(
        self,
        groups: list[list[MatrixPlan]],
        statistics: StageStatistics,
        guidance: Guidance,
        ledger: Ledger,
        workers: Workers,
    ) -> Iterator[tuple[MatrixPlan, Coded, dict[str, Any]]]:
        """The matrices of a stage, solved group by group; ranks share the groups, and threads those of experts."""
        final = {group[0].space: number for number, group in enumerate(groups)}
        together = _EXPERTS_OF_A_THREAD * workers.threads

        def solve(workers: Workers, number: int) -> Result:
            group, notes = groups[number], Ledger()
            if statistics.experts is not None and number % together == 0:
                return_freed_memory()  # or holes between codes that stay would be as large as they are
            known = statistics.of(group[0].space, notes, workers) or self._importance_of(group[0])
            known = replace(known, outputs=self._outputs_of(group, guidance))
            last = final[group[0].space] == number
            _, codes, records = zip(*self._solve(group, known, notes, workers, last), strict=True)
            return list(codes), list(records), notes.as_json()

        def solve_some(numbers: Sequence[int], workers: Workers) -> list[Result]:
            return list(workers.in_order(partial(solve, workers), numbers))

        # a matrix of an expert is too small for several threads: each thread takes a whole one
        if statistics.experts is None:
            solved = workers.map_ranks([partial(solve, number=number) for number in range(len(groups))])
        elif workers.size == 1:
            solved = workers.in_order(partial(solve, workers), range(len(groups)))
        else:
            threads = min(workers.all_gather(workers.threads))  # ranks may have other numbers, and cut alike
            each = min(_EXPERTS_OF_A_THREAD, len(groups) // (threads * workers.size))  # no rank is left idle
            size = threads * max(each, 1)
            parts = [range(start, min(start + size, len(groups))) for start in range(0, len(groups), size)]
            solved = chain.from_iterable(workers.map_ranks([partial(solve_some, numbers) for numbers in parts]))
        with large_tensors_kept() if statistics.experts is not None else nullcontext():
            for group, (codes, records, notes) in zip(groups, solved, strict=True):
                ledger.extend(LedgerEntry(**note) for note in notes)
                yield from zip(group, codes, records, strict=True)

    def _statistics(
        self,
        layer: nn.Module | None,
        compressed: Forward | None,
        original: Forward | None,
        stage: list[MatrixPlan],
        before: ExpertGrams | None,
        weights: Mapping[str, Tensor],
        ledger: Ledger,
    ) -> StageStatistics:
        """The statistics of inputs that the steps of a stage need. before: of the last stage of experts."""
        needing: dict[str, list[MatrixPlan]] = {}
        for plan in stage:
            if plan.needs:
                needing.setdefault(plan.space, []).append(plan)
        if not needing or layer is None or compressed is None or self.model is None:
            return StageStatistics({})
        experts = None
        routed = next((plan.path for plan in stage if plan.expert is not None and plan.needs_gram), None)
        if routed is not None:
            path = None if self.plan.spec.experts is None else self.plan.spec.experts.block(routed)
            paths = {space: seen_at(layer, plans) for space, plans in needing.items()}
            before = before if before is not None and before.leads_to(paths.values()) else None
            experts = ExpertGrams(path, paths, layer, compressed, self.model.device, before)
        try:
            found = collect(compressed, original, needing, self.model.device, self.progress, experts, weights)
        except RunError:
            self._refuse_infinite_weights(stage[0])  # which would be the cause
            raise
        for space, statistics in found.items():
            if statistics.dropped:
                first = needing[space][0]
                ledger.note("nonfinite_inputs", first.module, f"{statistics.dropped} tokens left out of its statistics")
        lend_ranges(found, needing, ledger)
        return StageStatistics(found, experts, {space: plans[0] for space, plans in needing.items()})

    def _refuse_infinite_weights(self, plan: MatrixPlan) -> None:
        """WeightsError for a tensor of the layer of a matrix that holds values that are not finite."""
        layer = plan.module.removesuffix(plan.path)
        for name in self.checkpoint.names():
            if name.startswith(layer):
                self.checkpoint.read_finite(name)

    def _outputs_of(self, group: list[MatrixPlan], guidance: Guidance) -> list[Tensor] | None:
        """What is known of the outputs of matrices that are solved as one; None where of one nothing is known."""
        if not all(plan.path in guidance.outputs for plan in group):
            return None
        return [products.to(self.device) for plan in group for products in guidance.outputs[plan.path]]

    def _importance_of(self, plan: MatrixPlan) -> Statistics:
        """Statistics that hold the importance of a matrix's inputs, where the user gave an importance matrix."""
        found = None if self.plan.importance is None else self.plan.importance.of(plan.entry.source.name)
        return Statistics(importance=None if found is None else torch.from_numpy(found).to(self.device))

    def _solve(
        self, group: list[MatrixPlan], stats: Statistics, ledger: Ledger, workers: Workers, last: bool
    ) -> list[tuple[MatrixPlan, Coded, dict[str, Any]]]:
        """Solve matrices that share input and options as one matrix, which is right since rows are independent.

        last: no later group asks for the drift of the input.
        """
        method = group[0].method
        if group[0].tied and stats.gram is not None:
            stats = replace(stats, found={**stats.found, "gram": with_lookups(stats.gram)})
        weights = [self._weight(plan) for plan in group]
        scale_dtype = DTYPES[group[0].entry.source.dtype]
        with torch.no_grad():
            sparse = pruned_group(group, weights, stats, ledger, self.rounded, workers)
            if last and stats.drift is not None:
                stats.drift.expect_last()
            if stats.gram is not None and group[0].expert is None:
                stats.gram.expect_one()
            blocks = RowBlocks(workers, self.device.type == "cuda", self.sweeper)
            solved: Solved = method.solve(_stacked(weights), stats, scale_dtype, blocks, sparse)
        if not group[0].entry.block:
            return_freed_memory()  # what its rows took, before the head is compared with its codes
        if solved.percdamp is not None and solved.percdamp > getattr(method, "percdamp", solved.percdamp):
            ledger.note("damping", group[0].module, f"percdamp raised to {solved.percdamp:g}")
        if solved.dead_inputs:
            ledger.note(
                "dead_inputs", group[0].module, f"{solved.dead_inputs} of {weights[0].shape[1]} were never active"
            )
        if solved.crowded_outliers:
            ledger.note(
                "outliers", group[0].module, f"{solved.crowded_outliers} more reach the threshold than keep 16 bits"
            )
        hessian = None if stats.gram is None else stats.gram.mean()
        result, start = [], 0
        for plan, weight in zip(group, weights, strict=True):
            stop = start + weight.shape[0]
            part = solved.coded.rows(slice(start, stop))
            if plan.method.fixed_inputs:
                part = replace(part, input_scale=input_scale(plan, stats))
            record = matrix_record(plan, weight, part, hessian, stats.gram, solved, workers)
            if sparse is not None:
                record |= sparsity_record(plan, weight, part, ledger, self.rounded)
            result.append((plan, part.to("cpu"), record))
            start = stop
        return result

    def _weight(self, plan: MatrixPlan) -> Tensor:
        """The source matrix [out, in] times its factors, in float32; a head, which has many rows, as it is stored."""
        weight = self.checkpoint.read_finite(plan.entry.source.name, self.device)
        weight = weight.to(torch.float32) if plan.entry.block else weight
        weight = multiplied(weight.T.contiguous() if plan.conv1d else weight, plan.factors)
        refuse_extremes(plan, weight)
        return weight


def windows_under_way(plan: Plan) -> AbstractContextManager[None]:
    """Within, windows run, whose tensors have the same sizes: their memory is kept.

    Not where there are experts, whose statistics stay and would lie between these tensors.
    """
    return large_tensors_kept() if plan.spec.experts is None else nullcontext()


def _stacked(weights: list[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _solved_as_one(stage: list[MatrixPlan], apart: bool) -> list[list[MatrixPlan]]:
    """Groups of the matrices of a stage that are solved as one: same space, options and source type.

    apart: every matrix is a group of its own.
    """
    groups: dict[tuple[str, str, str], list[MatrixPlan]] = {}
    for plan in stage:
        space = plan.path if apart or plan.solved_alone else plan.space
        groups.setdefault((space, plan.settings, plan.entry.source.dtype), []).append(plan)
    return list(groups.values())
