"""The loop: section by section, each on disk before the next begins; then the output, whole or not at all."""

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from llmcompress.calib.base import fingerprint
from llmcompress.calib.pack import save
from llmcompress.engine.calibration import calibration_tokens
from llmcompress.engine.compress import Compressor, install
from llmcompress.engine.forward import Forward, Replayed, Stream, Suspended
from llmcompress.engine.plan import Plan
from llmcompress.engine.progress import Progress
from llmcompress.engine.resources import return_freed_memory
from llmcompress.engine.write import write_output
from llmcompress.errors import StoppedError
from llmcompress.ledger import Entry as LedgerEntry
from llmcompress.ledger import Ledger
from llmcompress.model.build import StreamedModel
from llmcompress.model.skeleton import load_config
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.staging import Hidden, Staging

Stop = Callable[[], bool]


def run(plan: Plan, progress: Progress | None = None, stop: Stop = lambda: False) -> dict[str, Any]:
    """Carry a plan out and return its report. A rerun goes on after the last finished section.

    stop: asked after every section; when it says so the run ends with StoppedError and can be taken up again.
    """
    progress = progress or Progress()
    checkpoint = Checkpoint(plan.headers.path)
    calibrated = any(matrix.method.needs_calibration for layer in plan.layers for matrix in layer)
    sampled = plan.recipe.calibration.source == "self"
    kept = plan.work / "tokens.safetensors"  # sampling takes minutes, and depends on nothing but model and recipe
    tokens = None
    if calibrated:
        tokens = load_file(kept)["input_ids"] if sampled and kept.exists() else calibration_tokens(plan)
    identity = {**plan.identity, "tokens": fingerprint(tokens) if tokens is not None else None}
    staged = Staging(plan.work, identity)
    if tokens is not None and sampled:
        save(tokens, kept)
    done = sum(staged.has(number) for number in range(len(plan.layers)))
    progress.start(len(plan.layers), done)
    if tokens is None:
        _without_data(plan, checkpoint, staged, progress, stop)
    else:
        _with_data(plan, checkpoint, tokens, staged, progress, stop)

    calibration = None
    if tokens is not None:
        calibration = {"sha256": identity["tokens"], "samples": tokens.shape[0], "length": tokens.shape[1]}
    staged.remember_place(
        model=plan.headers.path, calibration=calibration, trust_remote_code=plan.options.trust_remote_code
    )
    progress.writing(plan.estimate.output_bytes)
    result = finish(plan, checkpoint, staged, calibration)
    if not plan.options.keep_work:
        staged.remove()
    return result


def finish(plan: Plan, checkpoint: Checkpoint, staged: Staging, calibration: dict[str, Any] | None) -> dict[str, Any]:
    """Write the output of a run whose sections are all staged; its report."""
    ledger = Ledger(list(plan.ledger.entries))
    linears: list[dict[str, Any]] = []
    for number in range(len(plan.layers)):
        records = staged.records(number)
        linears += records["linears"]
        ledger.extend(LedgerEntry(**entry) for entry in records["ledger"])
    return write_output(plan, checkpoint, staged, linears, ledger, calibration)


def _without_data(plan: Plan, checkpoint: Checkpoint, staged: Staging, progress: Progress, stop: Stop) -> None:
    compressor = Compressor(plan, checkpoint, None, progress)
    for number in range(len(plan.layers)):
        if staged.has(number):
            continue
        _check_stop(stop, plan)
        begin = time.perf_counter()
        progress.layer(number)
        staged.write_section(number, *compressor.layer(number))
        progress.layer_done(number, time.perf_counter() - begin)


def _with_data(
    plan: Plan, checkpoint: Checkpoint, tokens: Tensor, staged: Staging, progress: Progress, stop: Stop
) -> None:
    count = len(plan.layers)
    if all(staged.has(number) for number in range(count)):
        return
    dtype = getattr(torch, plan.dtype)
    model = StreamedModel(
        checkpoint,
        load_config(plan.headers.path, plan.options.trust_remote_code),
        plan.spec,
        dtype=dtype,
        device=device_of(plan.options.device),
        trust_remote_code=plan.options.trust_remote_code,
    )
    compressor = Compressor(plan, checkpoint, model, progress)
    paired = any(matrix.method.needs_original for layer in plan.layers for matrix in layer)
    names = ("compressed", "original") if paired else ("compressed",)
    hidden = _entering(model, tokens, staged, plan.options.batch, dtype, names)
    for number in range(hidden["compressed"].position, count):
        with model.layer(number) as layer, torch.no_grad():
            layers = {name: layer if name == "compressed" else deepcopy(layer) for name in names}
            if staged.has(number):
                coded = staged.read_section(number)
                for matrix in plan.layers[number]:
                    install(layer, matrix, coded[matrix.module])
                under_way = _forwards(plan, model, number, layers, hidden, begun=True)
            else:
                _check_stop(stop, plan)
                begin = time.perf_counter()
                progress.layer(number)
                under_way = _forwards(plan, model, number, layers, hidden)
                made = compressor.layer(number, layer, under_way["compressed"], under_way.get("original"))
                staged.write_section(number, *made)
                progress.layer_done(number, time.perf_counter() - begin)
            try:
                if number + 1 < count:
                    onward = {name: forward.outputs() for name, forward in under_way.items()}
                    hidden = staged.keep_hidden(number + 1, hidden["compressed"].shape, dtype, onward)
            finally:
                for forward in under_way.values():
                    forward.close()
        return_freed_memory()


def _forwards(
    plan: Plan,
    model: StreamedModel,
    number: int,
    layers: dict[str, torch.nn.Module],
    hidden: dict[str, Hidden],
    begun: bool = False,
) -> dict[str, Forward]:
    """How each stream runs through a layer; `begun`: its stages are behind it, only the outputs are wanted."""
    streams = {name: Stream(layers[name], hidden[name]) for name in layers}
    if begun or not plan.estimate.one_forward:
        return {name: Replayed(model, number, stream, plan.options.batch) for name, stream in streams.items()}
    spaces: dict[str, str] = {}
    for matrix in plan.layers[number]:
        if matrix.method.needs_calibration:
            spaces.setdefault(matrix.space, matrix.path)
    return {name: Suspended(model, number, stream, plan.options.batch, spaces) for name, stream in streams.items()}


def _entering(
    model: StreamedModel, tokens: Tensor, staged: Staging, batch: int, dtype: torch.dtype, names: Sequence[str]
) -> dict[str, Hidden]:
    """Hidden states to go on from: the newest kept ones, or the embedded tokens."""
    first = model.embed(tokens[:1])
    shape = (tokens.shape[0], tokens.shape[1], first.shape[-1])
    found = staged.hidden(names, shape, dtype)
    if found is not None:
        return found
    return staged.keep_hidden(0, shape, dtype, {name: model.embedded(tokens, batch) for name in names})


def _check_stop(stop: Stop, plan: Plan) -> None:
    if stop():
        raise StoppedError(
            "stopped at a safe point", f"run the same command again to go on; finished work is in {plan.work}"
        )


def device_of(name: str) -> torch.device:
    """cpu, cuda, or auto: cuda where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
