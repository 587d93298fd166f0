"""The loop: section by section, each on disk before the next begins; then the output, whole or not at all."""

import time
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from functools import partial
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
from llmcompress.engine.plan import Plan
from llmcompress.engine.progress import Progress
from llmcompress.engine.resources import keep_freed_memory, return_freed_memory
from llmcompress.engine.scaling import Scaled, Scaler
from llmcompress.engine.source import config_of
from llmcompress.engine.statistics import own, reusable
from llmcompress.engine.transforms import add_factors, open_transformed
from llmcompress.engine.write import write_output
from llmcompress.errors import StoppedError
from llmcompress.grids.coded import Coded
from llmcompress.ledger import Entry as LedgerEntry
from llmcompress.ledger import Ledger
from llmcompress.model.build import StreamedModel
from llmcompress.parallel import threads
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.folds import FoldedCheckpoint
from llmcompress.store.staging import Hidden, Staging
from llmcompress.store.statistics import Kept

Stop = Callable[[int], bool]

COMPRESSED, ORIGINAL = "compressed", "original"  # the streams: the model as compressed so far, and as it was


def run(
    plan: Plan,
    progress: Progress | None = None,
    stop: Stop = lambda finished: False,
    tokens: Tensor | None = None,
) -> dict[str, Any]:
    """Carry a plan out and return its report. A rerun goes on after the last finished section.

    stop: asked before every section, with the number of those that this start has finished; when it says so the run
    ends with StoppedError and can be taken up again. tokens: of the calibration [samples, length], where they are
    drawn already.
    """
    progress = progress or Progress()
    checkpoint = open_transformed(plan)
    sampled = plan.recipe.calibration.source == "self"
    kept = plan.work / "tokens.safetensors"  # sampling takes minutes, and depends on nothing but model and recipe
    if not plan.calibrated:
        tokens = None
    elif tokens is None:
        tokens = load_file(kept)["input_ids"] if sampled and kept.exists() else calibration_tokens(plan)
    identity = {**plan.identity, "tokens": fingerprint(tokens) if tokens is not None else None}
    known = keeping = None
    if plan.options.stats is not None and tokens is not None:
        known = reusable(plan, plan.options.stats, identity["tokens"])
        if known is None:
            keeping = own(plan, plan.options.stats, identity["tokens"])
        else:
            identity["statistics"] = known.key
    staged = Staging(plan.work, identity)
    with closing(staged):
        if tokens is not None and sampled:
            save(tokens, kept)
        done = sum(staged.has(number) for number in range(len(plan.layers)))
        progress.start(len(plan.layers), done)
        keep_freed_memory()
        with threads(plan.means.threads):
            sections = _Sections(plan, staged, progress, stop)
            if tokens is None or known is not None:
                _without_data(plan, checkpoint, sections, known)
            else:
                _with_data(plan, checkpoint, tokens, sections, keeping)

        calibration = None
        if tokens is not None:
            calibration = {"sha256": identity["tokens"], "samples": tokens.shape[0], "length": tokens.shape[1]}
        staged.remember_place(
            model=plan.headers.path, calibration=calibration, trust_remote_code=plan.options.trust_remote_code
        )
        progress.writing(plan.estimate.output_bytes)
        result = finish(plan, staged, calibration)
        if not plan.options.keep_work:
            staged.remove()
        return result


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
    with threads(plan.means.threads):
        return write_output(plan, checkpoint, staged, {"linears": linears, "sites": sites}, ledger, calibration)


class _Sections:
    """The sections of a run, each made at a safe point and on disk before the next."""

    def __init__(self, plan: Plan, staged: Staging, progress: Progress, stop: Stop) -> None:
        self.plan, self.staged, self.progress, self.stop = plan, staged, progress, stop
        self.finished = 0  # by this start

    def make(
        self,
        number: int,
        work: Callable[[], tuple[dict[str, Coded], dict[str, Any]]],
        scaled: Scaled | None = None,
    ) -> None:
        """Keep what `work` gives as section `number`, and its scales; StoppedError if the run is to stop before."""
        if self.stop(self.finished):
            raise StoppedError(
                "stopped at a safe point",
                f"run the same command again to go on; finished work is in {self.plan.work}",
            )
        begin = time.perf_counter()
        self.progress.layer(number)
        coded, records = work()
        if scaled is not None:
            records = {**records, "sites": scaled.records, "ledger": [*scaled.ledger.as_json(), *records["ledger"]]}
        self.staged.write_section(number, coded, records, scaled.factors if scaled is not None else None)
        self.finished += 1
        self.progress.layer_done(number, time.perf_counter() - begin)


def _without_data(plan: Plan, checkpoint: Checkpoint, sections: _Sections, known: Kept | None) -> None:
    compressor = Compressor(plan, checkpoint, None, sections.progress, known)
    for number in range(len(plan.layers)):
        if not sections.staged.has(number):
            sections.make(number, partial(compressor.layer, number))


def _with_data(plan: Plan, checkpoint: Checkpoint, tokens: Tensor, sections: _Sections, keeping: Kept | None) -> None:
    count, staged = len(plan.layers), sections.staged
    if all(staged.has(number) for number in range(count)):
        return
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
    hidden = _entering(plan, model, tokens, staged, dtype)
    return_freed_memory()
    scaler = _scaler(plan, checkpoint, model, sections.progress)
    for number in range(hidden.position, count):
        done = staged.has(number)
        if done:
            add_factors(plan, checkpoint, number, staged.read_factors(number))
        with model.layer(number) as layer:
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
                hidden = staged.keep_hidden(number + 1, dtype, onward)
        return_freed_memory()


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


def _entering(plan: Plan, model: StreamedModel, tokens: Tensor, staged: Staging, dtype: torch.dtype) -> Hidden:
    """Hidden states to go on from: the newest kept ones, or the embedded tokens."""
    samples = {COMPRESSED: tokens.shape[0]}
    if plan.original_samples:
        samples[ORIGINAL] = plan.original_samples
    with model.outer(embed=True, head=False):
        width = model.prepare(tokens[:1])
        missing = next(number for number in range(len(plan.layers)) if not staged.has(number))
        found = staged.hidden({name: (rows, tokens.shape[1], width) for name, rows in samples.items()}, dtype, missing)
        if found is not None:
            return found
        return staged.keep_hidden(
            0, dtype, {name: model.embedded(tokens[:rows], plan.batch) for name, rows in samples.items()}
        )


def device_of(name: str) -> torch.device:
    """cpu, cuda, or auto: cuda where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
