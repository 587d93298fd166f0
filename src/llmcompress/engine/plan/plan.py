"""A plan: a run as it was resolved and checked. It is plain data, which every later phase reads and none changes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmcompress.arch.spec import ArchSpec
from llmcompress.engine.plan.estimate import Estimate
from llmcompress.engine.plan.importance import Importance
from llmcompress.engine.plan.matrix_plan import MatrixPlan, runs_text
from llmcompress.engine.plan.resources import Resources
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.source.tensor_names import Anatomy
from llmcompress.formats.base import Entry, Format, TensorSpec
from llmcompress.formats.gguf.file import GgufFile
from llmcompress.ledger import Ledger, LedgerEntry
from llmcompress.recipe import Recipe
from llmcompress.store.headers import ModelHeaders


@dataclass(frozen=True)
class Plan:
    """A run, resolved. prefix: on-disk name of the list of layers.

    output_kind: the name of the kind of weight files, `safetensors` or `gguf` (output_kinds.py). layers: matrices of
    each decoder layer, in order of execution. head: the output head, where it is rounded. entries: one for every
    source tensor. tensors: those that are written, in order. files: the GGUF files that hold the tensors, none for
    safetensors. modelfile: the text of a Modelfile, where the recipe asks for one. ledger: what was decided while
    planning, in order.
    """

    recipe: Recipe
    headers: ModelHeaders
    spec: ArchSpec
    prefix: str
    format: Format
    output_kind: str
    out: Path
    work: Path
    resources: Resources
    options: Options
    layers: tuple[tuple[MatrixPlan, ...], ...]
    head: tuple[MatrixPlan, ...]
    entries: tuple[Entry, ...]
    tensors: tuple[TensorSpec, ...]
    files: tuple[GgufFile, ...]
    modelfile: str | None
    estimate: Estimate
    importance: Importance | None = None
    ledger: tuple[LedgerEntry, ...] = ()

    def with_notes(self, notes: Iterable[LedgerEntry]) -> "Plan":
        """The same plan with more entries at the end of its ledger."""
        ledger = Ledger(self.ledger)
        ledger.extend(notes)
        return replace(self, ledger=ledger.entries)

    @property
    def sections(self) -> tuple[tuple[MatrixPlan, ...], ...]:
        """The matrices of each section of the run: the layers, then the head where it is rounded."""
        return (*self.layers, self.head) if self.head else self.layers

    @property
    def matrices(self) -> tuple[MatrixPlan, ...]:
        """All matrices that are changed, in order of execution."""
        return tuple(matrix for section in self.sections for matrix in section)

    @property
    def anatomy(self) -> Anatomy:
        return Anatomy(self.headers, self.spec, self.prefix, len(self.layers))

    @property
    def calibrated(self) -> bool:
        """Whether windows of text run through the model."""
        return runs_text(self.recipe, self.matrices)

    @property
    def original_samples(self) -> int:
        """Number of windows that also run through the uncompressed model, in whole batches."""
        asked = max((matrix.original_samples for matrix in self.matrices), default=0)
        return min(-(-asked // self.batch) * self.batch, self.recipe.calibration.samples)

    @property
    def follows_gradients(self) -> bool:
        """Whether a pass of gradients says beforehand what errors do to the prediction."""
        return any(matrix.follows_gradients for layer in self.layers for matrix in layer)

    @property
    def recovers(self) -> bool:
        """Whether scales and gains of layers are fitted to what the original layers give."""
        return any(matrix.recovers for layer in self.layers for matrix in layer)

    @property
    def dtype(self) -> str:
        """The floating-point type in which layers run."""
        return self.resources.dtype

    @property
    def batch(self) -> int:
        """Number of windows that run through a layer at once."""
        return self.resources.batch

    def on_demand(self, number: int) -> frozenset[str]:
        """Paths of the matrices of a section that are read for every product instead of being held in memory."""
        if not self.resources.experts_on_demand:
            return frozenset()
        return frozenset(matrix.path for matrix in self.sections[number] if matrix.expert is not None)

    @property
    def identity(self) -> dict[str, Any]:
        """What a work directory says of its run; a later start goes on with the run only where all of this is equal."""
        return {
            "recipe": {key: value for key, value in self.recipe.as_data().items() if key not in ("output", "expected")},
            "model": self.headers.contents,
            "imatrix": None if self.importance is None else self.importance.sha256,
            "compute_dtype": self.dtype,
            "batch": self.batch,
        }
