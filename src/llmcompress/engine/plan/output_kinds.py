"""The two kinds of output, safetensors files and GGUF files: whatever a plan decides differently for one and the other.

`output_kind` asks once which kind a recipe writes; the plan keeps the name of the kind, and writing goes by it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import ClassVar, Protocol

from llmcompress.engine.plan.gguf_plan import (
    GgufModel,
    TensorTypes,
    gguf_files_of,
    gguf_model,
    tensor_types,
    tensors_of,
)
from llmcompress.engine.plan.head_matrix import outside_bits, with_outside
from llmcompress.engine.plan.importance import Importance, given_importance, refuse_useless_importance
from llmcompress.engine.plan.matrix_options import resolve_matrix_options, resolve_typed_options
from llmcompress.engine.plan.modelfile import modelfile_text
from llmcompress.engine.plan.requantise import file_matrices, file_model
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.plan.scaled_sites import with_sites
from llmcompress.engine.plan.ternary_check import note_not_ternary
from llmcompress.engine.plan.transform_headers import transformed_headers
from llmcompress.engine.source.adapting import with_adapter
from llmcompress.engine.source.gguf_input import GgufHeaders
from llmcompress.engine.source.matrix_refs import Matrices, matrices_of
from llmcompress.engine.source.open import checkpoint_headers, source_headers
from llmcompress.engine.source.quantised import DecodedCheckpoint, DecodedHeaders, code_grid, kept_grid, note_decoded
from llmcompress.engine.source.stacked import unstacked_headers
from llmcompress.errors import PlanError
from llmcompress.formats.base import Entry, Format, TensorSpec
from llmcompress.formats.gguf.file import GgufFile
from llmcompress.grids.base import Spec
from llmcompress.grids.ggml import GgufTypes, gguf_types
from llmcompress.grids.inputs import fixed_for
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Method
from llmcompress.recipe import Recipe
from llmcompress.store.headers import ModelHeaders
from llmcompress.store.weight_files import weights_nbytes


class GridChoice(Protocol):
    """How the matrices of a plan get their grids. may_be_empty: whether a plan may also round no matrix at all."""

    may_be_empty: bool

    def importance(self, recipe: Recipe, ledger: Ledger) -> Importance | None:
        """The importance matrix that the recipe names; PlanError where it has no use."""

    def methods(self, step: Method, widths: Mapping[str, int], ledger: Ledger) -> dict[str, Method | None]:
        """The method of every module (on-disk name to in_features), None where nothing rounds the module."""


class GridsByOptions:
    """The options of the step say the grid of every matrix."""

    may_be_empty = False

    def importance(self, recipe: Recipe, ledger: Ledger) -> None:
        refuse_useless_importance(recipe)

    def methods(self, step: Method, widths: Mapping[str, int], ledger: Ledger) -> dict[str, Method | None]:
        return resolve_matrix_options(step, widths, ledger)


@dataclass(frozen=True)
class GridsByType:
    """Every tensor has a GGUF type, and the type is the grid of its matrices."""

    types: TensorTypes
    may_be_empty = True

    def importance(self, recipe: Recipe, ledger: Ledger) -> Importance | None:
        return given_importance(recipe, self.types, ledger)

    def methods(self, step: Method, widths: Mapping[str, int], ledger: Ledger) -> dict[str, Method | None]:
        return resolve_typed_options(step, widths, self.types.by_source)


@dataclass(frozen=True)
class Contents:
    """The model that a run works on: its headers after all transforms, its matrices, and how these get their grids.

    gguf: what GGUF files will hold, where the output is GGUF and its types are known.
    """

    headers: ModelHeaders
    matrices: Matrices
    grids: GridChoice
    gguf: GgufModel | None = None


@dataclass(frozen=True)
class OutputLayout:
    """The files of weights of an output. tensors: in the order in which they are written. nbytes: of all files.

    files: the GGUF files with their headers, none for safetensors. modelfile: the text of a Modelfile, where wanted.
    """

    tensors: tuple[TensorSpec, ...]
    nbytes: int
    files: tuple[GgufFile, ...] = ()
    modelfile: str | None = None

    def bits_per_weight(self, entries: Sequence[Entry]) -> float:
        """Bits of all tensors over the number of weights that they hold. entries: what the weights are decoded to."""
        shapes = [placed.tensor.shape for file in self.files for placed in file.tensors]
        shapes = shapes or [entry.source.shape for entry in entries]
        stored = [placed.nbytes for file in self.files for placed in file.tensors]
        stored = stored or [tensor.nbytes for tensor in self.tensors]
        return 8 * sum(stored) / max(sum(map(prod, shapes)), 1)


@dataclass(frozen=True)
class SafetensorsOutput:
    """The output of a recipe as safetensors files, in any format but GGUF. ledger: of the plan in the making."""

    recipe: Recipe
    format: Format
    options: Options
    ledger: Ledger
    name: ClassVar[str] = "safetensors"

    def open(self, model: Path) -> ModelHeaders:
        """The headers of what lies at `model`; CheckpointError for what this kind of output cannot be made of."""
        headers = checkpoint_headers(model)
        if self.format.name != "compressed-tensors":
            return headers  # without codes, files are loaded as the source's are
        return unstacked_headers(headers, self.ledger, only_merged=self.options.target == "transformers")

    def method_suffix(self, step: Method) -> str:
        """What the default name of the output says of the step that rounds."""
        if types := gguf_types(step):
            return f"{step.name}-{types.type}"
        return f"{step.name}-{step.label}{step.grid_type.group_label(step)}"

    def contents(self, headers: ModelHeaders) -> Contents:
        """Headers and matrices of a model, transformed, and how the matrices get grids. Raises LlmcompressError."""
        matrices = matrices_of(headers, self.options.trust_remote_code, self.ledger)
        if self.options.adapter is not None:
            headers = with_adapter(headers, matrices, self.options.adapter, self.ledger)
        matrices = with_sites(headers, matrices, self.recipe, self.options.trust_remote_code, self.ledger)
        anatomy = matrices.anatomy(headers)
        headers = transformed_headers(headers, self.recipe, anatomy, self.ledger)
        matrices = with_outside(matrices, replace(anatomy, headers=headers), self.recipe.method, self.format)
        types = gguf_types(self.recipe.method)
        if types is None:
            return Contents(headers, matrices, GridsByOptions())
        return self._typed(headers, matrices, types)

    def _typed(self, headers: ModelHeaders, matrices: Matrices, asked: GgufTypes) -> Contents:
        types = tensor_types(headers, tensors_of(headers), asked, self._measured, self.ledger)
        return Contents(headers, matrices, GridsByType(types))

    @property
    def _measured(self) -> bool:
        """Whether the run knows what errors in the inputs of its matrices cost."""
        step, calibration = self.recipe.method, self.recipe.calibration
        return (step is not None and step.needs_calibration) or calibration.imatrix is not None

    def layout(
        self, contents: Contents, entries: Sequence[Entry], out: Path, importance: Importance | None
    ) -> OutputLayout:
        """The files that hold the entries of a plan, which the format does not refuse."""
        if isinstance(contents.headers, DecodedHeaders):
            self._note_decoded(contents.headers, entries)
        stored = ([entry.source] if entry.grid is None else self.format.layout(entry) for entry in entries)
        tensors = tuple(spec for specs in stored for spec in specs)
        return OutputLayout(tensors, weights_nbytes(tensors, self.recipe.output.shard_size))

    def _note_decoded(self, headers: DecodedHeaders, entries: Sequence[Entry]) -> None:
        coded = {entry.module for entry in entries if entry.grid and self._keeps(headers, entry, entry.grid)}
        note_decoded(headers, set() if self.recipe.transforms or self.recipe.pruner else coded, self.ledger)

    def _keeps(self, headers: DecodedHeaders, entry: Entry, grid: Spec) -> bool:
        """Whether a matrix keeps the codes that its source has."""
        if entry.permuted or kept_grid(headers, entry.module, self.format.scales_of_sources) != grid:
            return False
        if entry.inputs is None or entry.inputs.dynamic:
            return True
        return fixed_for(DecodedCheckpoint(headers).inputs(entry.module), entry.inputs) is not None


class GgufOutput(SafetensorsOutput):
    """GGUF files, which may also be made of a quantised model, of the text part of a model, or of a GGUF file."""

    name = "gguf"

    def open(self, model: Path) -> ModelHeaders:
        return unstacked_headers(source_headers(model, self.ledger), Ledger())  # files hold them in one again

    def method_suffix(self, step: Method) -> str:
        types = gguf_types(step)
        return super().method_suffix(step) if types is None else f"{types.type}.gguf"

    def contents(self, headers: ModelHeaders) -> Contents:
        if not isinstance(headers, GgufHeaders):
            return super().contents(headers)
        step = self.recipe.method
        if self.options.adapter is not None:
            raise PlanError("an adapter is not merged into a GGUF file", "give the directory of the original model")
        if step is None or self.recipe.transforms or self.recipe.pruner:
            first = self.recipe.steps[0].name
            raise PlanError(f"{first} cannot be applied to a GGUF file", "give the original model's directory")
        if outside_bits(step):
            raise PlanError(
                "heads and embeddings of GGUF files have types, not --head-bits or --embedding-bits",
                "use --output-type and --embedding-type",
            )
        matrices = file_matrices(headers)
        model = file_model(headers, step, self.recipe.output, self.ledger, self._measured)
        note_not_ternary(headers, model.types, self.ledger)
        return Contents(headers, matrices, GridsByType(model.types), model)

    def _typed(self, headers: ModelHeaders, matrices: Matrices, asked: GgufTypes) -> Contents:
        model = gguf_model(headers, asked, self.recipe.output, self._measured, self.ledger)
        if not self.recipe.transforms:
            note_not_ternary(headers, model.types, self.ledger)
        return Contents(headers, matrices, GridsByType(model.types), model)

    def layout(
        self, contents: Contents, entries: Sequence[Entry], out: Path, importance: Importance | None
    ) -> OutputLayout:
        headers, model = contents.headers, contents.gguf
        assert model is not None  # the format refuses matrices without a GGUF type
        if isinstance(headers, DecodedHeaders):
            changed = model.types.factors
            self._note_decoded(headers, [entry for entry in entries if entry.source.name not in changed])
        keys = () if importance is None else importance.keys
        files = gguf_files_of(model, headers, out, self.recipe.output.shard_size, keys)
        return OutputLayout(
            tuple(placed.spec for file in files for placed in file.tensors),
            sum(file.nbytes for file in files),
            files,
            self._modelfile(model, headers.path, files[0].name),
        )

    def _keeps(self, headers: DecodedHeaders, entry: Entry, grid: Spec) -> bool:
        if super()._keeps(headers, entry, grid):
            return True
        known = code_grid(headers, entry.module)
        return grid.holds_codes and headers.format.affine and (known is None or known.affine)

    def _modelfile(self, model: GgufModel, directory: Path, file: str) -> str | None:
        if not self.recipe.output.modelfile or model.tokenizer is None:
            return None
        written, notes = modelfile_text(directory, file, model.tokenizer.add_bos, self.options.trust_remote_code)
        for note in notes:
            self.ledger.note("engine", "ollama", note)
        return written


def output_kind(recipe: Recipe, format_: Format, options: Options, ledger: Ledger) -> SafetensorsOutput:
    """The kind of output that a format is written as."""
    return (GgufOutput if format_.name == "gguf" else SafetensorsOutput)(recipe, format_, options, ledger)
