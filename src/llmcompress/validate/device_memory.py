"""GPU memory that validating a model takes, foreseen from headers, beside what is free."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from llmcompress.arch.spec import attention_heads
from llmcompress.engine.source.open import directory_headers
from llmcompress.engine.source.quantised import DecodedHeaders
from llmcompress.errors import PlanError
from llmcompress.ledger import Ledger
from llmcompress.store.headers import ModelHeaders
from llmcompress.validate.gguf_file import gguf_in
from llmcompress.validate.request import Timing

_CONTEXT = 600_000_000  # bytes: CUDA's own, libraries and kernels
_DECODED = 12 << 24  # bytes of weights that are decoded at once, codes and temporaries included
_LOGITS = 6  # copies of a window's logits in float32: of each model, and of what is compared


def foreseen(
    model: Path, ref: Path | None, dtype: torch.dtype, windows: int, length: int, timing: Timing | None = None
) -> int:
    """Bytes of GPU memory at most at once: while two models are compared, or while the reference is timed."""
    timing = timing or Timing()
    headers = directory_headers(model if ref is None or gguf_in(model) is None else ref, Ledger())
    file = gguf_in(model)
    subject = file.stat().st_size if file is not None else resident(headers, dtype)
    config = headers.config
    width, vocabulary = _number(config, "hidden_size", "n_embd"), _number(config, "vocab_size")
    layers = _number(config, "num_hidden_layers", "n_layer")
    layer = 4 * sum(prod(item.spec.shape) for item in headers.tensors.values()) // max(layers, 1)
    compared = 1 + (ref is not None)
    streamed = compared * (layer + 4 * width * (windows * length + vocabulary))
    timed = (
        _cache(config, width, layers, dtype, timing) + _DECODED + 4 * max(timing.batches) * length * max(width * 8, 1)
    )
    comparing = subject + streamed + _LOGITS * 4 * length * vocabulary + _DECODED
    again = 0 if ref is None else resident(directory_headers(ref, Ledger()), torch.bfloat16)
    return _CONTEXT + max(comparing, max(subject, again) + timed)


def resident(headers: ModelHeaders, dtype: torch.dtype) -> int:
    """Bytes of a whole model: what is packed as its files have it, all else in `dtype`."""
    if not isinstance(headers, DecodedHeaders):
        return sum(prod(item.spec.shape) for item in headers.tensors.values()) * dtype.itemsize
    packed = {f"{module}.weight" for module in headers.packed}
    plain = sum(prod(item.spec.shape) for name, item in headers.tensors.items() if name not in packed)
    stored = sum(item.spec.nbytes for name, item in headers.stored.tensors.items() if name not in headers.tensors)
    return plain * dtype.itemsize + stored


def refuse_beyond(need: int, device: torch.device) -> None:
    """PlanError if a GPU has less memory free than is needed; nothing for other devices."""
    free = free_memory(device)
    if free is not None and need > free:
        raise PlanError(
            f"this takes about {need / 1e9:.1f} GB of GPU memory, of which {free / 1e9:.1f} GB are free",
            "use fewer --windows or a shorter --length, or leave --backend out: then one layer is there at a time",
        )


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a GPU; None for other devices."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _cache(config: Mapping[str, Any], width: int, layers: int, dtype: torch.dtype, timing: Timing) -> int:
    """Bytes of keys and values of the largest batch that is timed."""
    heads = attention_heads(config)
    share = 1.0 if heads is None else heads[1] / heads[0]
    return int(max(timing.batches) * (timing.prompt + 2 * timing.new) * 2 * layers * width * share * dtype.itemsize)


def _number(config: Mapping[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)
