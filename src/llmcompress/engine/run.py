"""The loop: section by section, each on disk before the next begins; then the output, whole or not at all."""

import time
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from llmcompress.calib.base import fingerprint
from llmcompress.calib.pack import save
from llmcompress.engine.allocation import allocated, outlier_weighed
from llmcompress.engine.calibration import calibration_tokens
from llmcompress.engine.compress import Compressor, install
from llmcompress.engine.forward import Forward, Stream
from llmcompress.engine.hidden import COMPRESSED, ORIGINAL, entering, kept
from llmcompress.engine.means import usual_threads
from llmcompress.engine.plan import Plan
from llmcompress.engine.progress import Progress
from llmcompress.engine.ranks import device_of
from llmcompress.engine.resources import keep_freed_memory, return_freed_memory
from llmcompress.engine.scaling import Scaled, Scaler
from llmcompress.engine.source import config_of
from llmcompress.engine.statistics import own, reusable
from llmcompress.engine.transforms import add_factors, open_transformed
from llmcompress.engine.write import write_output
from llmcompress.errors import PlanError, StoppedError
from llmcompress.grids.coded import Coded
from llmcompress.hardware import exact_float32
from llmcompress.ledger import Entry as LedgerEntry
from llmcompress.ledger import Ledger
from llmcompress.model.build import StreamedModel
from llmcompress.parallel import threads
from llmcompress.processes import agreed, first, gathered, member_of, processes, rank, spread
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.folds import FoldedCheckpoint
from llmcompress.store.staging import Staging
from llmcompress.store.statistics import Kept

Stop = Callable[[int], bool]


def run(
    plan: Plan,
    progress: Progress | None = None,
    stop: Stop = lambda finished: False,
    tokens: Tensor | None = None,
) -> dict[str, Any]:
    """Carry a plan out and return its report. A rerun goes on after the last finished section.

    stop: asked before every section, with the number of those that this start has finished; when it says so the run
    ends with StoppedError and can be taken up again. tokens: of the calibration [samples, length], where they are
    drawn already. Of several processes (engine/ranks.py) the first writes, and has the report; that of the others is
    empty.
    """
    progress = progress or Progress()
    device_of(plan.options.device)  # refuses one that is not there
    _check_shares(plan)
    checkpoint = open_transformed(plan)
    sampled = plan.recipe.calibration.source == "self"
    place = plan.work / "tokens.safetensors"  # sampling takes minutes, and depends on nothing but model and recipe

    def chosen() -> Tensor | None:
        if tokens is not None or not plan.calibrated:
            return tokens if plan.calibrated else None
        return load_file(place)["input_ids"] if sampled and place.exists() else calibration_tokens(plan)

    tokens = first(chosen)
    identity = {**plan.identity, "tokens": fingerprint(tokens) if tokens is not None else None}
    known, keeping = _statistics(plan, identity["tokens"])
    if known is not None:
        identity["statistics"] = known.key
    with closing(_opened(plan, identity)) as staged:
        if tokens is not None and sampled and rank() == 0:
            save(tokens, place)
        missing = first(lambda: [number for number in range(len(plan.layers)) if not staged.has(number)])
        progress.start(len(plan.layers), len(plan.layers) - len(missing))
        sections = _Sections(plan, staged, progress, stop, missing)
        keep_freed_memory()
        with threads(plan.means.threads), exact_float32():
            if tokens is None or known is not None:
                _without_data(plan, checkpoint, sections, known)
            elif missing:
                _with_data(plan, checkpoint, tokens, sections, keeping)

        if rank() > 0:
            return {}
        calibration = None
        if tokens is not None:
            calibration = {"sha256": identity["tokens"], "samples": tokens.shape[0], "length": tokens.shape[1]}
        staged.remember_place(
            model=plan.headers.path, calibration=calibration, trust_remote_code=plan.options.trust_remote_code
        )
        progress.writing(plan.estimate.output_bytes)
        with member_of(None):  # the others are done
            result = finish(plan, staged, calibration)
        if not plan.options.keep_work:
            staged.remove()
        return result


def _opened(plan: Plan, identity: dict[str, Any]) -> Staging:
    """The work directory, which the first process makes and holds."""
    made = agreed(lambda: Staging(plan.work, identity) if rank() == 0 else None)
    return agreed(lambda: made or Staging(plan.work, identity, leads=False))


def _statistics(plan: Plan, tokens: str | None) -> tuple[Kept | None, Kept | None]:
    """Statistics of another run to go by, and where this one keeps its own: chosen, and kept, by the first process."""

    def chosen() -> tuple[bool, str, dict[str, Any]] | None:
        if plan.options.stats is None or tokens is None:
            return None
        known = reusable(plan, plan.options.stats, tokens)
        held = known or own(plan, plan.options.stats, tokens)
        return known is not None, str(held.path), dict(held.about)

    found = first(chosen)
    if found is None:
        return None, None
    held = Kept(Path(found[1]), found[2])
    return (held, None) if found[0] else (None, held if rank() == 0 else None)


def _check_shares(plan: Plan) -> None:
    """PlanError where some processes would have no windows."""
    batches = -(-plan.recipe.calibration.samples // plan.batch)
    if plan.calibrated and processes() > batches:
        raise PlanError(
            f"windows make fewer batches ({batches}) than there are processes ({processes()})",
            "start fewer, or use more --samples or a smaller --batch",
        )


def finish(plan: Plan, staged: Staging, calibration: dict[str, Any] | None) -> dict[str, Any]:
    """Write the output of a run whose sections are all staged; its report."""
    ledger = Ledger(list(plan.ledger.entries))
    linears: list[dict[str, Any]] = []
    sites: list[dict[str, Any]] = []
    checkpoint = open_transformed(plan)
    for number in range(len(plan.layers)):
        records = staged.records(number)
        add_factors(plan, checkpoint, number, staged.read_factors(number))
        linears += records["linears"]
        sites += records.get("sites", [])
        ledger.extend(LedgerEntry(**entry) for entry in records["ledger"])
    count = (plan.options.threads or usual_threads()) if plan.means.gpu else plan.means.threads
    with threads(count):  # packing is for processors
        return write_output(plan, checkpoint, staged, {"linears": linears, "sites": sites}, ledger, calibration)


class _Sections:
    """The sections of a run, each made at a safe point and on disk before the next."""

    def __init__(self, plan: Plan, staged: Staging, progress: Progress, stop: Stop, missing: list[int]) -> None:
        """missing: numbers of those that were not there, ascending."""
        self.plan, self.staged, self.progress, self.stop, self.missing = plan, staged, progress, stop, missing
        self.finished = 0  # by this start

    def make(
        self,
        number: int,
        work: Callable[[], tuple[dict[str, Coded], dict[str, Any]]],
        scaled: Scaled | None = None,
    ) -> None:
        """Keep what `work` gives as section `number`, and its scales; StoppedError if the run is to stop before."""
        if any(gathered(self.stop(self.finished))):
            raise StoppedError(
                "stopped at a safe point",
                f"run the same command again to go on; finished work is in {self.plan.work}",
            )
        begin = time.perf_counter()
        self.progress.layer(number)
        coded, records = work()
        if scaled is not None:
            records = {**records, "sites": scaled.records, "ledger": [*scaled.ledger.as_json(), *records["ledger"]]}
        first(lambda: self.staged.write_section(number, coded, records, None if scaled is None else scaled.factors))
        self.finished += 1
        self.progress.layer_done(number, time.perf_counter() - begin)


def _without_data(plan: Plan, checkpoint: Checkpoint, sections: _Sections, known: Kept | None) -> None:
    compressor = Compressor(plan, checkpoint, None, sections.progress, known)
    made = spread([partial(compressor.layer, number) for number in sections.missing])
    for number in sections.missing:
        _expect(plan, checkpoint, number + 1)
        sections.make(number, partial(next, made))


def _with_data(plan: Plan, checkpoint: Checkpoint, tokens: Tensor, sections: _Sections, keeping: Kept | None) -> None:
    count, staged = len(plan.layers), sections.staged
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
        plan = allocated(plan, outlier_weighed(plan, checkpoint, model, tokens, staged.path))
    compressor = Compressor(plan, checkpoint, model, sections.progress, keeping=keeping)
    hidden = entering(plan, model, tokens, staged, sections.missing[0], dtype)
    return_freed_memory()
    scaler = _scaler(plan, checkpoint, model, sections.progress)
    for number in range(hidden.position, count):
        done = number not in sections.missing
        if done:
            add_factors(plan, checkpoint, number, staged.read_factors(number))
        with model.layer(number) as layer:
            _expect(plan, checkpoint, number + 1)
            scaled = None
            if scaler is not None and not done:
                whole = Forward(
                    model, number, Stream("whole", layer, hidden.streams[COMPRESSED]), plan.batch, staged.path, {}
                )
                scaled = scaler.layer(number, layer, whole)
                return_freed_memory()
            under_way = {
                name: Forward(
                    model,
                    number,
                    Stream(name, layer if name == COMPRESSED else deepcopy(layer), windows),  # before codes come in
                    plan.batch,
                    staged.path,
                    {} if done else _spaces(plan, number),
                    measuring=name == COMPRESSED and not done and plan.recipe.kv_cache is not None,
                )
                for name, windows in hidden.streams.items()
            }
            if done:
                coded = staged.read_section(number)
                for matrix in plan.layers[number]:
                    install(layer, matrix, coded[matrix.module])
            else:
                streams = under_way[COMPRESSED], under_way.get(ORIGINAL)
                sections.make(number, partial(compressor.layer, number, layer, *streams), scaled)
            if number + 1 < count:
                onward = {name: forward.outputs() for name, forward in under_way.items()}
                hidden = kept(staged, number + 1, dtype, onward)
        return_freed_memory()


def _expect(plan: Plan, checkpoint: Checkpoint, number: int) -> None:
    """Have a layer's matrices read from disk while others are worked on."""
    if number < len(plan.layers):
        checkpoint.expect(matrix.entry.source.name for matrix in plan.layers[number])


def _scaler(plan: Plan, checkpoint: Checkpoint, model: StreamedModel, progress: Progress) -> Scaler | None:
    """What chooses the factors of scaling steps, if there are any."""
    if isinstance(checkpoint, FoldedCheckpoint) and plan.scales_channels:
        return Scaler(plan, checkpoint, model, progress)
    return None


def _spaces(plan: Plan, number: int) -> dict[str, str]:
    """The spaces whose statistics a layer's methods ask for, each with a matrix that reads it; experts' apart."""
    spaces: dict[str, str] = {}
    for matrix in plan.layers[number]:
        if matrix.needs_calibration and matrix.expert is None:
            spaces.setdefault(matrix.space, matrix.path)
    return spaces
