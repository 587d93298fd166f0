"""One section: statistics stage by stage, each stage on inputs that the stages before it have already changed."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.process.process_memory import return_freed_memory
from llmcompress.engine.process.progress import Progress
from llmcompress.engine.process.ranks import device_of
from llmcompress.engine.run.collect import ExpertInputs, collect, stages_of
from llmcompress.engine.run.forward import Forward
from llmcompress.engine.run.input_scales import input_scale, lend_ranges
from llmcompress.engine.run.kept_statistics import note_reuse
from llmcompress.engine.run.kv_ranges import largest_magnitudes
from llmcompress.engine.run.pruning import pruned, sparsity_record
from llmcompress.engine.run.rtn_ratio import against_rtn, energies
from llmcompress.engine.source.gguf_input import GgufHeaders
from llmcompress.engine.source.quantised import DecodedHeaders
from llmcompress.grids.coded import Coded
from llmcompress.grids.inputs import InputGrid
from llmcompress.grids.recode import recode
from llmcompress.ledger import Ledger, LedgerEntry
from llmcompress.methods.base import Solved, Statistics
from llmcompress.model.experts import Expert
from llmcompress.model.rounded import round_inputs
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.solve.column_sweep import Sweeper
from llmcompress.solve.row_blocks import RowBlocks
from llmcompress.stats.gram import Gram
from llmcompress.store.checkpoint import DTYPES, Checkpoint
from llmcompress.store.statistics import Kept, stored
from llmcompress.workers import Workers

STARVED = 4  # tokens per input channel below which an expert's Gram is blended with the layer's


class Compressor:
    """Chooses the codes of a layer's matrices; the layer ends up holding their decoded values."""

    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint,
        model: StreamedModel | None,
        progress: Progress,
        sweeper: Sweeper | None,
        known: Kept | None = None,
        keeping: Kept | None = None,
    ) -> None:
        """sweeper: what decides blocks of columns on the run's device; None for torch.

        known: statistics in place of those of windows. keeping: where those of windows are kept.
        """
        self.plan, self.checkpoint, self.model, self.progress = plan, checkpoint, model, progress
        self.sweeper, self.known, self.keeping = sweeper, known, keeping
        self.device = device_of(plan.options.device)
        self.rounded = isinstance(plan.headers, DecodedHeaders | GgufHeaders)

    def layer(
        self,
        number: int,
        workers: Workers,
        layer: nn.Module | None = None,
        compressed: Forward | None = None,
        original: Forward | None = None,
    ) -> tuple[dict[str, Coded], dict[str, Any]]:
        """Codes by on-disk module name, and {"linears": [...], "ledger": [...], "kv_cache": {...}} about them."""
        coded: dict[str, Coded] = {}
        linears: list[dict[str, Any]] = []
        ledger = Ledger()
        known = {} if self.known is None else self.known.read(number, self.device)
        gathered: dict[str, Tensor] = {}
        if self.known is not None:
            note_reuse(self.plan, self.known, ledger)
        for stage in stages_of(self.plan.layers[number]):
            self.progress.stage(stage[0].space, len(stage))
            kept = [found for plan in stage if (found := self._recoded(plan, ledger, workers)) is not None]
            stage = [plan for plan in stage if plan.module not in {found[0].module for found in kept}]
            statistics = known or self._statistics(layer, compressed, original, stage, ledger)
            if self.keeping is not None:
                gathered |= stored(statistics)
            return_freed_memory()  # what the windows took, before the matrices of the solvers come
            groups = _together(stage, apart=self.plan.importance is not None)
            solutions = self._solutions(groups, statistics, ledger, workers)
            for plan, solved, record in chain(kept, solutions):
                coded[plan.module] = solved
                linears.append(record)
                self.progress.matrix(record)
                if layer is not None:
                    install(layer, plan, solved)
        if self.keeping is not None:
            self.keeping.write(number, gathered)
        records: dict[str, Any] = {"linears": linears, "ledger": ledger.as_json()}
        if compressed is not None and self.plan.recipe.kv_cache is not None:
            records["kv_cache"] = largest_magnitudes(compressed.key_value_range(), number)
        return coded, records

    def _solutions(
        self, groups: list[list[MatrixPlan]], statistics: dict[str, Statistics], ledger: Ledger, workers: Workers
    ) -> Iterator[tuple[MatrixPlan, Coded, dict[str, Any]]]:
        """The matrices of a stage, solved group by group; ranks share the groups."""
        final = {group[0].space: number for number, group in enumerate(groups)}

        def solve(number: int, workers: Workers) -> tuple[list[Coded], list[dict[str, Any]], list[dict[str, str]]]:
            notes, group = Ledger(), groups[number]
            known = statistics.get(group[0].space) or self._given(group[0])
            last = final[group[0].space] == number
            _, codes, records = zip(*self._solve(group, known, notes, workers, last), strict=True)
            return list(codes), list(records), notes.as_json()

        solved = workers.map_ranks([partial(solve, number) for number in range(len(groups))])
        for group, (codes, records, notes) in zip(groups, solved, strict=True):
            ledger.extend(LedgerEntry(**note) for note in notes)
            yield from zip(group, codes, records, strict=True)

    def _statistics(
        self,
        layer: nn.Module | None,
        compressed: Forward | None,
        original: Forward | None,
        stage: list[MatrixPlan],
        ledger: Ledger,
    ) -> dict[str, Statistics]:
        """What the methods of a stage need to know of their inputs, by space."""
        needing: dict[str, list[MatrixPlan]] = {}
        for plan in stage:
            if plan.needs_calibration:
                needing.setdefault(plan.space, []).append(plan)
        if not needing or layer is None or compressed is None or self.model is None:
            return {}
        watch = None
        solved = [plan for plan in stage if plan.needs_gram]
        if any(plan.expert is not None for plan in solved) and self.plan.spec.experts is not None:
            path = self.plan.spec.experts.path
            watch = ExpertInputs(path, layer.get_submodule(path), self.model.device, compressed.workers)
        found = collect(compressed, original, needing, self.model.device, self.progress, watch)
        for space, statistics in found.items():
            first, gram = needing[space][0], statistics.gram
            dropped = max(
                seen.dropped
                for seen in (gram, statistics.range, statistics.peaks, statistics.squares)
                if seen is not None
            )
            if dropped:
                ledger.note("nonfinite_inputs", first.module, f"{dropped} tokens left out of its statistics")
            if watch is not None and gram is not None:
                _feed_starved(gram, first, watch, layer, ledger, compressed.workers)
        lend_ranges(found, needing, ledger)
        return found

    def _recoded(
        self, plan: MatrixPlan, ledger: Ledger, workers: Workers
    ) -> tuple[MatrixPlan, Coded, dict[str, Any]] | None:
        """A matrix whose source is codes that its type holds, on no statistics at all; None for any other."""
        grid = plan.entry.grid
        if plan.pruner is not None or grid is None or not grid.holds_codes:
            return None  # as the plan has said
        source = self.checkpoint.coded(plan.module)
        if source is None:
            return None
        name, wanted = source.grid.spec.name, grid.name
        found = recode(source, grid)
        if found is None:
            ledger.note("requantised", name, f"decoded and rounded anew to {wanted}, which does not hold its values")
            return None
        record = _record(plan, source.decode(), found, None, None, Solved(found), workers)
        if record["relative_error"]:
            ledger.note("requantised", name, f"its codes are kept in {wanted}, scales and minima rounded to float16")
        return plan, found, {**record, "method": "recoded"}

    def _given(self, plan: MatrixPlan) -> Statistics:
        """What the user's importance matrix says of the input of a matrix."""
        found = None if self.plan.importance is None else self.plan.importance.of(plan.entry.source.name)
        return Statistics(importance=None if found is None else torch.from_numpy(found).to(self.device))

    def _solve(
        self, group: list[MatrixPlan], stats: Statistics, ledger: Ledger, workers: Workers, last: bool
    ) -> list[tuple[MatrixPlan, Coded, dict[str, Any]]]:
        """Matrices that share input and options, solved as one: their rows are independent.

        last: no later group asks for the drift of the input.
        """
        method = group[0].method
        weights = [self._weight(plan) for plan in group]
        scale_dtype, gpu = DTYPES[group[0].entry.source.dtype], self.device.type == "cuda"
        with torch.no_grad():
            sparse = pruned(group, weights, stats, ledger, self.rounded, workers)
            if last and gpu and stats.drift is not None:
                stats.drift.expect_last()  # a GPU has little memory: what is read is given up
            blocks = RowBlocks(workers, gpu, self.sweeper)
            solved: Solved = method.solve(torch.cat(weights), stats, scale_dtype, blocks, sparse)
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
            record = _record(plan, weight, part, hessian, stats.gram, solved, workers)
            record |= sparsity_record(plan, weight, part.decode(), ledger, self.rounded)
            result.append((plan, part.to("cpu"), record))
            start = stop
        return result

    def _weight(self, plan: MatrixPlan) -> Tensor:
        """The source matrix [out, in] in float32 on the run's device."""
        weight = self.checkpoint.read_finite(plan.entry.source.name, self.device).to(torch.float32)
        return weight.T.contiguous() if plan.conv1d else weight


def install(layer: nn.Module, plan: MatrixPlan, coded: Coded) -> None:
    """Put decoded values into a layer, and round its inputs: what is stored is what the next matrix sees."""
    module = layer.get_submodule(plan.path)
    value, weight = coded.decode(), module.weight
    weight.data.copy_(value.T if plan.conv1d else value)  # type: ignore[operator]
    if plan.entry.inputs is not None:
        round_inputs(module, InputGrid(plan.entry.inputs, coded.input_scale).to(weight.device))  # type: ignore[arg-type]


def _together(stage: list[MatrixPlan], apart: bool) -> list[list[MatrixPlan]]:
    """Matrices of a stage that read the same space under the same options and source type; `apart`: each on its own.

    So are those whose scales are quantised in their turn, by what is common to one matrix.
    """
    groups: dict[tuple[str, str, str], list[MatrixPlan]] = {}
    for plan in stage:
        space = plan.path if apart or plan.method.joins_rows else plan.space
        groups.setdefault((space, plan.settings, plan.entry.source.dtype), []).append(plan)
    return list(groups.values())


def _record(
    plan: MatrixPlan,
    weight: Tensor,
    coded: Coded,
    hessian: Tensor | None,
    gram: Gram | None,
    solved: Solved,
    workers: Workers,
) -> dict[str, Any]:
    """What the report says about a matrix. loss: squared output error per token as a share of the output's energy."""
    delta = coded.decode() - weight
    record: dict[str, Any] = {
        "name": plan.module,
        "method": plan.method.name,
        "grid": plan.entry.grid.name if plan.entry.grid else None,
        "shape": [plan.entry.out_features, plan.entry.in_features],
        "permuted": plan.entry.permuted,
        "transposed": plan.entry.transposed,
        "relative_error": _significant(float(delta.norm() / weight.norm().clamp_min(1e-30))),
    }
    if plan.entry.inputs is not None:
        record["inputs"] = plan.entry.inputs.name
    if coded.input_scale is not None:
        record["input_scale"] = _significant(float(coded.input_scale))
    if gram is not None and hessian is not None:
        loss, energy = energies((delta, weight), hessian, workers)
        record["loss"] = _significant(loss / max(energy, 1e-30))
        record["tokens"] = gram.tokens
        record["percdamp"] = solved.percdamp
    if plan.pruner is None and plan.entry.grid is not None and plan.entry.grid.rounds_at_once:
        ratio = against_rtn(weight, delta, plan.entry.grid, hessian, workers)
        record["rtn_ratio"] = None if ratio is None else _significant(ratio)
    return record


def _significant(value: float) -> float:
    return float(f"{value:.6g}")


def _feed_starved(
    gram: Gram, plan: MatrixPlan, watch: ExpertInputs, layer: nn.Module, ledger: Ledger, workers: Workers
) -> None:
    """Shrink the Gram of an expert with too few tokens towards that of all tokens that entered the block.

    For gate and up the prior is the block's own input; for down it is a sample of that input pushed through the expert
    whatever the router says, so that both priors lie in the right space.
    """
    needed = STARVED * gram.size
    seen = gram.tokens
    if seen >= needed:
        return
    weight = needed - seen
    if plan.path.endswith("down_proj"):
        expert = layer.get_submodule(plan.path.rpartition(".")[0])
        assert isinstance(expert, Expert)
        prior = Gram(gram.size, workers, gram.sum.device)
        with torch.no_grad():
            prior.update(expert.inner(watch.sample()))
    else:
        prior = watch.gram
    gram.shrink_towards(prior.mean(), float(weight))
    ledger.note(
        "starved_expert", plan.module, f"{seen} tokens for {gram.size} inputs: blended with the layer's statistics"
    )
