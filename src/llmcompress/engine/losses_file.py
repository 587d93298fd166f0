"""Losses that were measured, kept as JSON: another size of the same model then needs no measuring."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmcompress.engine.losses import Losses, candidates
from llmcompress.errors import PlanError
from llmcompress.formats.gguf.tensors import GGUFTensor
from llmcompress.store.files import create, make_parent, writing
from llmcompress.store.headers import read_json

_HINT = "give another file, or delete it to measure anew"


def write_losses(file: Path, model: str, losses: Losses) -> None:
    """A new file. model: what tells it from others (headers.contents). RunError if the system refuses it."""
    data = json.dumps({"model": model, "losses": losses}, indent=1) + "\n"
    with writing(file):
        make_parent(file)
        with create(file) as handle:
            handle.write(data.encode())


def read_losses(file: Path, model: str, tensors: Sequence[GGUFTensor]) -> Losses:
    """The losses of `tensors`, each for all its candidates; PlanError for a file that has not just these."""
    data = read_json(file)
    if data.get("model") != model:
        raise PlanError(f"{file} holds no losses of this model", _HINT)
    losses = data.get("losses")
    return {tensor.name: _of(file, losses, tensor) for tensor in tensors}


def _of(file: Path, losses: Any, tensor: GGUFTensor) -> dict[str, float]:
    found = losses.get(tensor.name) if isinstance(losses, dict) else None
    kinds = candidates(tensor.shape[-1])
    if not isinstance(found, dict) or not all(_is_loss(found.get(kind)) for kind in kinds):
        raise PlanError(f"{file} lacks losses of {tensor.name}, or has some that are none", _HINT)
    return {kind: float(found[kind]) for kind in kinds}


def _is_loss(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
