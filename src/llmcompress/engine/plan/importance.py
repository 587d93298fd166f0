"""An importance matrix that the user gave, checked against the model when a run is planned."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcompress.engine.plan.gguf_plan import TensorTypes
from llmcompress.errors import LlmcompressError, PlanError
from llmcompress.formats.gguf.file import Placed
from llmcompress.formats.gguf.imatrix import Imatrix, ImatrixEntry, check, floored, numbered, split_experts, unfloored
from llmcompress.formats.gguf.imatrix_file import read_imatrix
from llmcompress.formats.gguf.keys import Key, text, u32
from llmcompress.formats.gguf.mixture import is_quantised
from llmcompress.grids.ggml import gguf_types
from llmcompress.grids.grid_type import gguf_specs
from llmcompress.ledger import Ledger
from llmcompress.recipe import Recipe

_PLAIN = "Q8_0"  # the one block type whose scales are not searched for
_LONGEST = 127  # bytes of a text that llama-quantize writes


@dataclass(frozen=True, eq=False)
class Importance:
    """The importance matrix of a model: what errors in the inputs of its matrices cost.

    file, sha256: name of the given file and hash (hex) of its content. keys: what a GGUF file says of the importance
    matrix. tensors: mean squares [matrices, in] float32 by GGUF name. places: GGUF name, and number within that
    tensor, of each matrix of a layer, by on-disk tensor.
    """

    file: str
    sha256: str
    keys: tuple[Key, ...]
    tensors: Mapping[str, NDArray[np.float32]]
    places: Mapping[str, tuple[str, int]]

    def of(self, source: str) -> NDArray[np.float32] | None:
        """Mean squares [in] of the inputs of a layer's matrix, given by its on-disk tensor; None without data."""
        name, number = self.places[source]
        found = self.tensors.get(name)
        return None if found is None else found[number]


def refuse_useless_importance(recipe: Recipe) -> None:
    """PlanError if a recipe names an importance matrix and has no use for it."""
    step = recipe.method
    if recipe.calibration.imatrix is None:
        return
    if recipe.transforms:
        raise PlanError(
            f"{recipe.transforms[0].name} changes channels that the importance matrix speaks of",
            "leave imatrix out, or the step",
        )
    if step is None or gguf_types(step) is None:
        raise PlanError("an importance matrix is for types of GGUF only", "give types by gguf:, or leave imatrix out")
    if step.needs_calibration:
        raise PlanError(
            f"{step.name} measures its inputs itself and has no use for an importance matrix",
            "leave imatrix out, or use rtn",
        )


def given_importance(recipe: Recipe, types: TensorTypes, ledger: Ledger) -> Importance | None:
    """The importance matrix that a recipe names, None if it names none.

    Zeros are raised to a share of the median, and the ledger says so; the search `compat` keeps zeros, as
    llama-quantize does. PlanError or CalibrationError for an importance matrix that has no use, cannot be read, or is
    of another model.
    """
    refuse_useless_importance(recipe)
    if recipe.calibration.imatrix is None or recipe.method is None:
        return None
    exact = recipe.method.search == "compat"
    file = Path(recipe.calibration.imatrix)
    imatrix = read_imatrix(file)
    stacks = [placed for placed in types.tensors if is_quantised(placed.tensor.name, placed.tensor.shape)]
    wanted = {placed.tensor.name: _sizes(placed) for placed in stacks}
    try:
        missing, foreign = check(imatrix, wanted)
    except LlmcompressError as error:
        raise type(error)(f"{file}: {error.message}", error.hint) from None
    _note_foreign(foreign, types, ledger)
    imatrix = split_experts(imatrix, wanted)
    tensors = {}
    for placed in stacks:
        name, used = placed.tensor.name, placed.type.name in gguf_specs() and placed.type.name != _PLAIN
        if used and name in missing:
            _note_missing(placed, types, ledger)
        elif used:
            tensors[name] = _costs(name, imatrix.entries[name], exact, ledger)
    return Importance(
        file.name,
        hashlib.sha256(file.read_bytes()).hexdigest(),
        tuple(_keys(file.name, imatrix)),
        tensors,
        {
            source: (placed.tensor.name, number * _sizes(placed)[1] // len(placed.tensor.sources))
            for placed in stacks
            if placed.tensor.name.startswith("blk.")
            for number, source in enumerate(placed.tensor.sources)
        },
    )


def _sizes(placed: Placed) -> tuple[int, int]:
    """Columns and matrices of a tensor."""
    shape = placed.tensor.shape
    return shape[-1], shape[0] if len(shape) > 2 else 1


def _costs(name: str, entry: ImatrixEntry, exact: bool, ledger: Ledger) -> NDArray[np.float32]:
    """Importance [matrices, in] of a tensor. Missing values are filled in, and the ledger says with what."""
    found = unfloored(entry) if exact else floored(entry)
    if found.experts:
        which = numbered(found.experts, len(found.importance))
        ledger.note("importance", name, f"no token came to {which}: given the {found.source}")
    if found.columns:
        ledger.note("importance", name, f"{found.columns:,} columns raised to {found.floor:g} of the median")
    return found.importance


def _note_foreign(foreign: tuple[str, ...], types: TensorTypes, ledger: Ledger) -> None:
    """Note entries of tensors that the model lacks. Entries of its other tensors, such as routers, are usual."""
    known = {placed.tensor.name for placed in types.tensors}
    for name in foreign:
        if name not in known:
            ledger.note("importance", name, "in the importance matrix, but not a tensor of this model")


def _note_missing(placed: Placed, types: TensorTypes, ledger: Ledger) -> None:
    name = placed.tensor.name
    if not name.startswith("blk."):
        return  # embeddings and heads are seldom measured
    if placed.type.name == "Q2_K" and types.kind.name == "Q2_K_S":
        raise PlanError(f"the importance matrix has no data for {name}, which Q2_K_S needs", "measure it, or take Q2_K")
    ledger.note("importance", name, "no data: rounded as without an importance matrix")


def _keys(file: str, imatrix: Imatrix) -> list[Key]:
    """The keys that llama-quantize writes, with file names in place of paths: a file shall not tell directories."""
    keys = [text("quantize.imatrix.file", _cut(file))]
    keys += [text("quantize.imatrix.dataset", _cut(Path(name).name)) for name in imatrix.datasets[:1] if name]
    keys.append(u32("quantize.imatrix.entries_count", len(imatrix.entries)))
    return keys + ([u32("quantize.imatrix.chunks_count", imatrix.chunk_count)] if imatrix.chunk_count else [])


def _cut(value: str) -> str:
    return value.encode(errors="replace")[:_LONGEST].decode(errors="ignore")
