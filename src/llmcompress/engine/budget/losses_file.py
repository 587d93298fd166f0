"""Measured losses as a JSON file, so that fitting the same model to another size measures nothing."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmcompress.engine.budget.type_losses import Losses
from llmcompress.errors import PlanError, RunError
from llmcompress.store.files import refuse_unwritable, writing
from llmcompress.store.headers import read_json
from llmcompress.store.sealed import content_of, sealed
from llmcompress.store.unfinished import claimed, put_in_place

_HINT = "give another file, or delete it to measure anew"


def kept_losses(
    file: Path | None, of: Mapping[str, str], wanted: Mapping[str, Sequence[str]], measured: Callable[[], Losses]
) -> Losses:
    """The losses in `file` if it exists; else those that `measured` returns, which are then written to `file`.

    of: what the losses are measured on, such as a hash of the model. PlanError where another run writes to `file`;
    RunError for measured losses that are not finite, of which none could be chosen.
    """
    if file is None:
        return _finite(measured())
    refuse_unwritable(file)
    if file.exists():
        return read_losses(file, of, wanted)
    with claimed(file) as claim:
        if file.exists():  # written in the last moment
            return read_losses(file, of, wanted)
        losses = _finite(measured())
        with writing(file):
            put_in_place(claim, file, sealed({**of, "losses": losses}))
    return losses


def _finite(losses: Losses) -> Losses:
    for name, found in losses.items():
        for kind, loss in found.items():
            if not math.isfinite(loss):
                raise RunError(f"what {name} loses on {kind} is not finite", "look at its weights, and at config.json")
    return losses


def read_losses(file: Path, of: Mapping[str, str], wanted: Mapping[str, Sequence[str]]) -> Losses:
    """The losses `wanted` (names to kinds); PlanError if the file lacks some or was measured on something else."""
    try:
        data = content_of(read_json(file))
    except ValueError as error:
        raise PlanError(f"{file} is damaged: {error}", _HINT) from None
    for key, value in of.items():
        if data.get(key) != value:
            raise PlanError(f"{file} holds no losses of this {key}", _HINT)
    losses = data.get("losses")
    return {name: _of(file, losses, name, kinds) for name, kinds in wanted.items()}


def _of(file: Path, losses: Any, name: str, kinds: Sequence[str]) -> dict[str, float]:
    found = losses.get(name) if isinstance(losses, dict) else None
    if not isinstance(found, dict) or not all(_is_loss(found.get(kind)) for kind in kinds):
        lacking = next((kind for kind in kinds if not (isinstance(found, dict) and _is_loss(found.get(kind)))), "")
        raise PlanError(f"{file} lacks losses of {name} for {lacking}, or has some that are none", _HINT)
    return {kind: float(found[kind]) for kind in kinds}


def _is_loss(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
