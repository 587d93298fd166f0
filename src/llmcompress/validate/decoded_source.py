"""The tensors of a source as a run read them: those of its files, and matrices that it stores as codes, decoded.

Codes of a source are decoded by the reader of the engine, which proves nothing about that reader; what is proved is the
output made of its values. The tensors of a source that is not quantised are read here without the engine.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from llmcompress.engine.source.adapting import as_merged
from llmcompress.engine.source.open import checkpoint_headers, open_checkpoint
from llmcompress.engine.source.quantised import DecodedHeaders
from llmcompress.errors import LlmcompressError
from llmcompress.store.checkpoint import DTYPES, Checkpoint
from llmcompress.store.headers import SETTINGS
from llmcompress.validate.stored import Array, DamageError, Tensor, read_json, read_source


class DecodedMatrices:
    """Decoded matrices of a source by name; the one that was asked for last is kept."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._last: tuple[str, torch.Tensor] | None = None

    def values(self, name: str) -> torch.Tensor:
        """Values, float32 where they are of a matrix alone; DamageError."""
        if self._last is None or self._last[0] != name:
            try:
                self._last = name, self.checkpoint.read(name)
            except LlmcompressError as error:
                raise DamageError(error.message) from None
        return self._last[1]


@dataclass(frozen=True)
class DecodedMatrix(Tensor):
    """A matrix that a source stores as codes, under the name `stored`, which stays where layers get other numbers.

    Its bytes are its values rounded to the model's own type.
    """

    matrices: DecodedMatrices
    stored: str

    def raw(self) -> Array:
        rounded = self.matrices.values(self.stored).to(DTYPES[self.dtype])
        return rounded.contiguous().view(torch.uint8).numpy().reshape(-1)

    def floats(self, part: slice = slice(None), *, transposed: bool = False) -> Array:
        values = self.matrices.values(self.stored).to(torch.float32).numpy()
        found: Array = np.ascontiguousarray(values[:, part].T if transposed else values[part])
        return found


def source_tensors(source: Path, adapter: Path | None = None) -> dict[str, Tensor]:
    """The tensors that a run reads of a model into which an adapter is merged, by name; DamageError."""
    originals = read_source(source)
    coded = "quantization_config" in read_json(source / "config.json") or (source / SETTINGS).exists()
    if not coded and adapter is None:
        return originals
    try:
        headers = as_merged(checkpoint_headers(source), adapter)
    except LlmcompressError as error:
        raise DamageError(error.message) from None
    packed = set(headers.merged.changes) if headers.merged is not None else set()
    if isinstance(headers, DecodedHeaders):
        packed |= {*headers.stacks, *(f"{module}.weight" for module in headers.packed)}
    if not packed:
        return originals
    matrices = DecodedMatrices(open_checkpoint(headers))
    found: dict[str, Tensor] = {}
    for name, stored in headers.tensors.items():
        spec = stored.spec
        if name in packed:
            found[name] = DecodedMatrix(name, spec.dtype, spec.shape, stored.file, 0, spec.nbytes, matrices, name)
        else:
            found[name] = originals[name]
    return found
