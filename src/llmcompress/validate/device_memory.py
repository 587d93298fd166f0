"""GPU memory that validating a model will take, estimated from headers, and its comparison with the free memory."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from llmcompress.arch.spec import attention_heads
from llmcompress.engine.plan.memory_model import CUDA_CONTEXT, DECODED, LOGIT_AGREEMENT, MemoryModel, Phase, Term
from llmcompress.engine.source.open import checkpoint_headers
from llmcompress.engine.source.quantised import DecodedHeaders
from llmcompress.errors import PlanError
from llmcompress.store.headers import ModelHeaders
from llmcompress.validate.gguf_file import gguf_in
from llmcompress.validate.request import Timing


def validation_memory(
    model: Path, ref: Path | None, dtype: torch.dtype, windows: int, length: int, timing: Timing | None = None
) -> MemoryModel:
    """GPU memory in three phases: comparing both models, timing the model, then timing the reference."""
    timing = timing or Timing()
    headers = checkpoint_headers(model if ref is None or gguf_in(model) is None else ref)
    file, config = gguf_in(model), headers.config
    subject = file.stat().st_size if file is not None else resident_bytes(headers, dtype)
    again = 0 if ref is None else resident_bytes(checkpoint_headers(ref), torch.bfloat16)
    width, vocabulary = _number(config, "hidden_size", "n_embd"), _number(config, "vocab_size")
    layers, compared = _number(config, "num_hidden_layers", "n_layer"), 1 + (ref is not None)
    layer = 4 * sum(prod(item.spec.shape) for item in headers.tensors.values()) // max(layers, 1)
    heads = attention_heads(config)
    share = 1.0 if heads is None else heads[1] / heads[0]
    cache = int(max(timing.batches) * (timing.prompt + 2 * timing.new) * 2 * layers * width * share * dtype.itemsize)

    def phase(name: str, **terms: int) -> Phase:
        return Phase(name, [Term(term, nbytes, "gpu") for term, nbytes in terms.items()])

    states, logits = compared * 4 * width * (windows * length + vocabulary), LOGIT_AGREEMENT * length * vocabulary
    comparing = phase("comparing", model=subject, layers=compared * layer, states=states, logits=logits)
    batch = 4 * max(timing.batches) * length * max(width * 8, 1)
    timed = phase("timing", model=max(subject, again), cache=cache, batch=batch)
    return MemoryModel(phase("", context=CUDA_CONTEXT, decoded=DECODED).terms, [comparing, timed])


def resident_bytes(headers: ModelHeaders, dtype: torch.dtype) -> int:
    """Bytes of a whole model in memory: packed tensors as in the files, all other tensors in `dtype`."""
    if not isinstance(headers, DecodedHeaders):
        return sum(prod(item.spec.shape) for item in headers.tensors.values()) * dtype.itemsize
    packed = {f"{module}.weight" for module in headers.packed}
    plain = sum(prod(item.spec.shape) for name, item in headers.tensors.items() if name not in packed)
    stored = sum(item.spec.nbytes for name, item in headers.stored.tensors.items() if name not in headers.tensors)
    return plain * dtype.itemsize + stored


def refuse_beyond(need: int, device: torch.device) -> None:
    """PlanError if a GPU has fewer free bytes than `need`; other devices are not checked."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    if free is not None and need > free:
        raise PlanError(
            f"this takes about {need / 1e9:.1f} GB of GPU memory, of which {free / 1e9:.1f} GB are free",
            "use fewer --windows or a shorter --length, or leave --backend out: then one layer is there at a time",
        )


def _number(config: Mapping[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)
