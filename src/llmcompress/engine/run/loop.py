"""The loop: section by section, each on disk before the next begins; then the output, whole or not at all."""

import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.process.process_memory import return_freed_memory
from llmcompress.engine.process.progress import Progress
from llmcompress.engine.process.ranks import device_of
from llmcompress.engine.run.forward import NOT_RECORDED, Forward, Recording, Stream
from llmcompress.engine.run.hidden_states import COMPRESSED, ORIGINAL, entering, kept
from llmcompress.engine.run.layer import Compressor, install
from llmcompress.engine.run.owl import allocated, outlier_weighed
from llmcompress.engine.run.scaling import Scaled, Scaler
from llmcompress.engine.run.transformed import add_factors
from llmcompress.engine.source.open import config_of
from llmcompress.errors import StoppedError
from llmcompress.grids.coded import Coded
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.solve.column_sweep import Sweeper
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.folds import FoldedCheckpoint
from llmcompress.store.staging import Staging
from llmcompress.store.statistics import Kept
from llmcompress.workers import Workers

Stop = Callable[[int], bool]


class Sections:
    """The sections of a run, each made at a safe point and on disk before the next."""

    def __init__(
        self, plan: Plan, staged: Staging, progress: Progress, stop: Stop, missing: list[int], workers: Workers
    ) -> None:
        """missing: numbers of those that were not there, ascending."""
        self.plan, self.staged, self.progress, self.stop, self.missing = plan, staged, progress, stop, missing
        self.workers = workers
        self.finished = 0  # by this start

    def make(
        self,
        number: int,
        work: Callable[[], tuple[dict[str, Coded], dict[str, Any]]],
        scaled: Scaled | None = None,
    ) -> None:
        """Keep what `work` gives as section `number`, and its scales; StoppedError if the run is to stop before."""
        if any(self.workers.all_gather(self.stop(self.finished))):
            raise StoppedError(
                "stopped at a safe point",
                f"run the same command again to go on; finished work is in {self.plan.work}",
            )
        begin = time.perf_counter()
        self.progress.layer(number)
        coded, records = work()
        if scaled is not None:
            records = {**records, "sites": scaled.records, "ledger": [*scaled.ledger.as_json(), *records["ledger"]]}
        factors = None if scaled is None else scaled.factors
        self.workers.broadcast(lambda: self.staged.write_section(number, coded, records, factors))
        self.finished += 1
        self.progress.layer_done(number, time.perf_counter() - begin)


def run_uncalibrated(
    plan: Plan, checkpoint: Checkpoint, sections: Sections, known: Kept | None, sweeper: Sweeper | None
) -> None:
    compressor = Compressor(plan, checkpoint, None, sections.progress, sweeper, known)
    made = sections.workers.map_ranks([partial(compressor.layer, number) for number in sections.missing])
    for number in sections.missing:
        _expect(plan, checkpoint, number + 1)
        sections.make(number, partial(next, made))


def run_calibrated(
    plan: Plan,
    checkpoint: Checkpoint,
    tokens: Tensor,
    sections: Sections,
    keeping: Kept | None,
    sweeper: Sweeper | None,
) -> None:
    count, staged, workers = len(plan.layers), sections.staged, sections.workers
    dtype = getattr(torch, plan.dtype)
    model = StreamedModel(
        checkpoint,
        config_of(plan.headers, plan.options.trust_remote_code),
        plan.spec,
        dtype=dtype,
        device=device_of(plan.options.device),
        trust_remote_code=plan.options.trust_remote_code,
        tiled_attention=True,
    )
    if plan.recipe.pruner is not None and plan.recipe.pruner.allocation == "owl":
        plan = allocated(plan, outlier_weighed(plan, checkpoint, model, tokens, staged.path, workers))
    compressor = Compressor(plan, checkpoint, model, sections.progress, sweeper, keeping=keeping)
    hidden = entering(plan, model, tokens, staged, sections.missing[0], dtype, workers)
    return_freed_memory()
    scaler = _scaler(plan, checkpoint, model, sections.progress, workers)
    for number in range(hidden.position, count):
        done = number not in sections.missing
        if done:
            add_factors(plan, checkpoint, number, staged.read_factors(number))
        with model.layer(number) as layer:
            _expect(plan, checkpoint, number + 1)
            scaled = None
            if scaler is not None and not done:
                stream = Stream("whole", layer, hidden.streams[COMPRESSED])
                whole = Forward(model, number, stream, plan.batch, workers)
                scaled = scaler.layer(number, layer, whole)
                return_freed_memory()
            under_way = {
                name: Forward(
                    model,
                    number,
                    Stream(name, layer if name == COMPRESSED else deepcopy(layer), windows),  # before codes come in
                    plan.batch,
                    workers,
                    NOT_RECORDED if done else Recording(staged.path, _spaces(plan, number)),
                    watches_cache=name == COMPRESSED and not done and plan.recipe.kv_cache is not None,
                )
                for name, windows in hidden.streams.items()
            }
            if done:
                coded = staged.read_section(number)
                for matrix in plan.layers[number]:
                    install(layer, matrix, coded[matrix.module])
            else:
                streams = under_way[COMPRESSED], under_way.get(ORIGINAL)
                sections.make(number, partial(compressor.layer, number, workers, layer, *streams), scaled)
            if number + 1 < count:
                onward = {name: forward.outputs() for name, forward in under_way.items()}
                hidden = kept(staged, number + 1, dtype, onward, workers)
        return_freed_memory()


def _expect(plan: Plan, checkpoint: Checkpoint, number: int) -> None:
    """Have a layer's matrices read from disk while others are worked on."""
    if number < len(plan.layers):
        checkpoint.expect(matrix.entry.source.name for matrix in plan.layers[number])


def _scaler(
    plan: Plan, checkpoint: Checkpoint, model: StreamedModel, progress: Progress, workers: Workers
) -> Scaler | None:
    """What chooses the factors of scaling steps, if there are any."""
    if isinstance(checkpoint, FoldedCheckpoint) and plan.scales_channels:
        return Scaler(plan, checkpoint, model, progress, workers)
    return None


def _spaces(plan: Plan, number: int) -> dict[str, str]:
    """The spaces whose statistics a layer's methods ask for, each with a matrix that reads it; experts' apart."""
    spaces: dict[str, str] = {}
    for matrix in plan.layers[number]:
        if matrix.needs_calibration and matrix.expert is None:
            spaces.setdefault(matrix.space, matrix.path)
    return spaces
