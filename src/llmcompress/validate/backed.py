"""A validation run: the whole packed model on one device, its linears run by kernels or by torch.

The figures are those of the packed model. The decoded checkpoint runs beside it in float32, one section at a time;
comparing the logits of the two shows whether the packed model computes what its codes say.
"""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llmcompress.errors import RunError
from llmcompress.model.changing_cache import Change, ChangingCache
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.validate import agreement
from llmcompress.validate.adapted_model import adapt_streamed, adapt_whole
from llmcompress.validate.backend import Backend, Say, compute_dtype, open_backend
from llmcompress.validate.device_memory import refuse_beyond, validation_memory
from llmcompress.validate.evaluate import Collected, Watch, amount, lockstep
from llmcompress.validate.evaluation import CacheOutcome
from llmcompress.validate.key_value_cache import cache_of
from llmcompress.validate.load import load_whole, open_streamed, refuse_other_vocabulary
from llmcompress.validate.reference_cache import ReferenceCache, reference_cache
from llmcompress.validate.request import Request
from llmcompress.validate.speed import speeds
from llmcompress.validate.token_statistics import Array, Tokens, token_figures

_REFERENCE = torch.bfloat16  # type in which the original is timed


@dataclass(frozen=True)
class Validated:
    """figures: of the model and of the agreement of its logits with its codes. runtime: `Runtime` of evaluation.py."""

    figures: dict[str, Any]
    runtime: dict[str, Any]
    tokens: Tokens
    dtype: str
    cache: Change | None
    ref_cache: CacheOutcome | None


def validate(request: Request, windows: Tensor, watch: Watch, say: Say, tell: Say) -> Validated:
    """Run a model on windows [windows, length] int64 as `request` asks. say: told which linears kernels do not take.

    tell: told of the windows once models are open.
    KernelsError where kernels cannot run, PlanError where the GPU has too little memory, RunError where it runs out.
    """
    assert request.backend is not None
    backend = open_backend(request.backend, request.device, say)
    dtype = compute_dtype(request.dtype, backend)
    memory = validation_memory(request.model, request.ref, dtype, windows.shape[0], windows.shape[1], request.timing)
    refuse_beyond(memory.peak("gpu"), backend.device)
    with _memory_of(backend.device):
        return _validated(request, windows, backend, dtype, watch, say, tell)


def _validated(
    request: Request, windows: Tensor, backend: Backend, dtype: torch.dtype, watch: Watch, say: Say, tell: Say
) -> Validated:
    cache = cache_of(request.model, request.cache)
    model: Any = _whole(request.model, request, backend.device, dtype, linear=backend.linears(say))
    if request.adapter is not None:
        adapt_whole(model, request.adapter, request.model, backend.device)
    decoded, reference = _beside(request, backend.device, cache)
    kept = reference_cache(request, reference, windows)
    tell(amount(windows))
    tokens, errors = _measured(model, cache, decoded, reference, windows, request.batch, watch, kept)
    found = agreement.agreement_figures(errors, dtype, len(decoded.layers), _rounds_inputs(model))
    timing = replace(request.timing, prompt=min(request.timing.prompt, windows.shape[1]))
    runtime = {
        "backend": backend.name,
        "device": _name(backend.device),
        "linears": dict(sorted(Counter(_kernels(model)).items())),
        "weights_bytes": _bytes_of(model),
        "speed": speeds(model, backend.device, timing),
        "peak_bytes": _peak(backend.device),
        "launches": backend.launches,
    }
    del model, decoded, reference
    gc.collect()
    if request.ref is not None:
        original = _whole(request.ref, request, backend.device, _REFERENCE, linear=None)
        runtime["reference_weights_bytes"] = _bytes_of(original)
        runtime["reference_speed"] = speeds(original, backend.device, timing)
    figures, outcome = {**token_figures(tokens), **found}, None if kept is None else kept.outcome
    return Validated(figures, runtime, tokens, str(dtype).removeprefix("torch."), cache, outcome)


def _whole(path: Path, request: Request, device: torch.device, dtype: torch.dtype, linear: Any) -> nn.Module:
    source = request.ref if path == request.model else None
    return load_whole(
        path,
        dtype=dtype,
        device=device,
        linear=linear,
        trust_remote_code=request.trust_remote_code,
        source=source,
    )


def _beside(request: Request, device: torch.device, cache: Change | None) -> tuple[StreamedModel, StreamedModel | None]:
    """The decoded checkpoint with the same adapter and cache, and any reference: float32, section by section."""
    opening = {"dtype": torch.float32, "device": device, "trust_remote_code": request.trust_remote_code}
    decoded = open_streamed(request.model, source=request.ref, **opening)  # type: ignore[arg-type]
    if request.adapter is not None:
        adapt_streamed(decoded, request.adapter, request.model)
    decoded.cache = cache
    if request.ref is None:
        return decoded, None
    reference = open_streamed(request.ref, **opening)  # type: ignore[arg-type]
    refuse_other_vocabulary(request.model, decoded.config, request.ref, reference.config)
    return decoded, reference


@torch.no_grad()
def _measured(
    model: Any,
    cache: Change | None,
    decoded: StreamedModel,
    reference: StreamedModel | None,
    windows: Tensor,
    batch: int,
    watch: Watch,
    kept: ReferenceCache | None,
) -> tuple[Tokens, Array]:
    """Per-token figures of a model, and relative errors [windows, length] of its logits to the decoded model's."""
    beside = [item for item in (decoded, reference) if item is not None]
    collected, errors = Collected(), []
    for ids, rows in zip(windows, lockstep(beside, torch.split(windows, batch), watch, kept), strict=True):
        wanted, *original = rows(0, len(ids))
        rounded = {} if cache is None else {"past_key_values": ChangingCache(model.config, cache)}
        logits = model(ids[None].to(wanted.device), use_cache=cache is not None, **rounded).logits[0].to(torch.float32)
        errors.append(agreement.logits_errors(logits, wanted).to("cpu", torch.float64).numpy())
        collected.add([values[:-1] for values in (logits, *original)], ids[1:])
    return collected.tokens(len(windows)), np.stack(errors)


@contextmanager
def _memory_of(device: torch.device) -> Iterator[None]:
    """RunError if the GPU runs out of memory inside this context."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(f"out of GPU memory ({str(error).partition('. ')[0]})", "use --windows 8 or so") from None


def _kernels(model: nn.Module) -> Iterator[str]:
    """The name of the kernel that multiplies, for each linear on codes."""
    return (str(item.kernel) for item in model.modules() if hasattr(item, "kernel") and hasattr(item, "in_features"))


def _rounds_inputs(model: nn.Module) -> bool:
    return any(getattr(item, "rounds", False) for item in model.modules())


def _bytes_of(model: nn.Module) -> int:
    """Bytes of parameters and buffers, shared ones once, and of the other tensors that linears on codes keep."""
    held = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return sum(held.values()) + sum(getattr(item, "packed_bytes", 0) for item in model.modules())


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
