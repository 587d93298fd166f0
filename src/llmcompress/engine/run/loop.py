"""The loop over the layers: each layer becomes a section of the work directory before the next layer begins."""

import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial

from torch import Tensor, nn

from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.process.process_memory import return_freed_memory
from llmcompress.engine.process.progress import Progress
from llmcompress.engine.run.forward import Forward, Recording, Stream
from llmcompress.engine.run.guidance import measured_guidance
from llmcompress.engine.run.hidden_states import COMPRESSED, ORIGINAL, keep_hidden_states, starting_hidden_states
from llmcompress.engine.run.installed import install, seen_at
from llmcompress.engine.run.layer import Compressor, SolvedLayer, windows_under_way
from llmcompress.engine.run.scaling import Scaler, SiteFactors
from llmcompress.engine.run.transformed import fold_section
from llmcompress.errors import StoppedError
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.solve.column_sweep import Sweeper
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.folds import FoldedCheckpoint
from llmcompress.store.staging import Staging
from llmcompress.store.statistics import Kept
from llmcompress.workers import Workers

Stop = Callable[[int], bool]


class Sections:
    """The sections of a run. A run can be stopped before each section and goes on after the last one on disk."""

    def __init__(
        self, plan: Plan, staged: Staging, progress: Progress, stop: Stop, missing: list[int], workers: Workers
    ) -> None:
        """missing: numbers of the sections that are not on disk, ascending."""
        self.plan, self.staged, self.progress, self.stop, self.missing = plan, staged, progress, stop, missing
        self.workers = workers
        self.finished = 0  # sections, by this start of the run

    def make(
        self,
        number: int,
        work: Callable[[], SolvedLayer],
        scaled: SiteFactors | None = None,
    ) -> None:
        """Write what `work` returns as section `number`, with the factors in `scaled`.

        StoppedError if the run is to stop before this section.
        """
        if any(self.workers.all_gather(self.stop(self.finished))):
            raise StoppedError(
                "stopped at a safe point",
                f"run the same command again to go on; finished work is in {self.plan.work}",
            )
        begin = time.perf_counter()
        self.progress.layer(number)
        coded, records, gains = work()
        if scaled is not None:
            records = {**records, "sites": scaled.records, "ledger": [*scaled.ledger.as_json(), *records["ledger"]]}
        factors = None if scaled is None else scaled.factors
        self.workers.broadcast(lambda: self.staged.write_section(number, coded, records, factors, gains))
        self.finished += 1
        self.progress.layer_done(number, time.perf_counter() - begin)


def run_uncalibrated(
    plan: Plan, checkpoint: Checkpoint, sections: Sections, known: Kept | None, sweeper: Sweeper | None
) -> None:
    """Make the missing sections without text: on no statistics, or on those that another run has kept."""
    compressor = Compressor(plan, checkpoint, None, sections.progress, sweeper, known)
    made = sections.workers.map_ranks([partial(compressor.layer, number) for number in sections.missing])
    for number in sections.missing:
        _read_ahead(plan, checkpoint, number + 1)
        sections.make(number, partial(next, made))


def run_calibrated(
    plan: Plan,
    checkpoint: Checkpoint,
    model: StreamedModel,
    tokens: Tensor,
    sections: Sections,
    keeping: Kept | None,
    sweeper: Sweeper | None,
) -> None:
    """Make the missing sections on statistics of calibration text, layer by layer."""
    count, staged, workers, dtype = len(plan.sections), sections.staged, sections.workers, model.dtype
    guidance = measured_guidance(
        plan, checkpoint, tokens, staged, sections.progress, partial(sections.stop, 0), workers
    )
    compressor = Compressor(plan, checkpoint, model, sections.progress, sweeper, keeping=keeping, guidance=guidance)
    hidden = starting_hidden_states(plan, model, tokens, staged, sections.missing[0], dtype, workers)
    return_freed_memory()
    scaler = _scaler_of(plan, checkpoint, model, sections.progress, workers)
    for number in range(hidden.position, count):
        done, inside = number not in sections.missing, number < len(plan.layers)
        if done:
            fold_section(plan, checkpoint, number, staged)
        with model.layer(number, plan.on_demand(number)) as layer:
            _read_ahead(plan, checkpoint, number + 1)
            scaled = None
            if scaler is not None and inside and not done:
                stream = Stream("whole", layer, hidden.streams[COMPRESSED])
                whole = Forward(model, number, stream, plan.batch, workers)
                scaled = scaler.layer(number, layer, whole)
                return_freed_memory()
            recorded = _recorded_spaces(plan, number, layer) if inside and not done else {}
            under_way = {
                name: Forward(
                    model,
                    number,
                    Stream(name, layer if name == COMPRESSED else _as_it_is(layer), windows),
                    plan.batch,
                    workers,
                    Recording(staged.folder, recorded),
                    watches_cache=name == COMPRESSED and inside and not done and plan.recipe.kv_cache is not None,
                )
                for name, windows in hidden.streams.items()
            }
            if done:
                coded = staged.read_section(number)
                for matrix in plan.sections[number] if inside else ():
                    install(layer, matrix, coded[matrix.module])
            else:
                streams = under_way[COMPRESSED], under_way.get(ORIGINAL)
                sections.make(number, partial(compressor.layer, number, workers, layer, *streams), scaled)
            if number + 1 < count:
                onward = {name: forward.outputs() for name, forward in under_way.items()}
                with windows_under_way(plan):
                    hidden = keep_hidden_states(staged, number + 1, dtype, onward, workers)
        return_freed_memory()


def _as_it_is(layer: nn.Module) -> nn.Module:
    """A copy of a layer that stays what it is: weights share memory until codes come in, which take memory anew."""
    alike = {id(weight): nn.Parameter(weight.data, requires_grad=False) for weight in layer.parameters()}
    return deepcopy(layer, alike)


def _read_ahead(plan: Plan, checkpoint: Checkpoint, number: int) -> None:
    """Start reading the matrices of a layer from disk while another layer is worked on."""
    if number < len(plan.sections):
        checkpoint.expect(matrix.entry.source.name for matrix in plan.sections[number])


def _scaler_of(
    plan: Plan, checkpoint: Checkpoint, model: StreamedModel, progress: Progress, workers: Workers
) -> Scaler | None:
    """The object that chooses the factors of scaling steps; None if the recipe has no such steps."""
    if isinstance(checkpoint, FoldedCheckpoint) and plan.recipe.scales_channels:
        return Scaler(plan, checkpoint, model, progress, workers)
    return None


def _recorded_spaces(plan: Plan, number: int, layer: nn.Module) -> dict[str, str]:
    """The spaces whose statistics the steps of a layer need, each with a matrix that reads it; without experts."""
    readers: dict[str, list[MatrixPlan]] = {}
    for matrix in plan.layers[number]:
        if matrix.needs and matrix.expert is None:
            readers.setdefault(matrix.space, []).append(matrix)
    return {space: seen_at(layer, plans) for space, plans in readers.items()}
