"""Planning the recovery of a compressed model: what of it is trained, on which text, and what that takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from llmcompress.engine.plan.memory_model import TRAINING_STATE
from llmcompress.engine.plan.pass_memory import ModelSizes, recover_memory
from llmcompress.engine.plan.paths import check_room, path_beside, refuse_model_itself
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.source.gguf_weights import GgufWeights
from llmcompress.engine.source.header_checks import hidden_width, numbered
from llmcompress.engine.source.matrix_refs import Matrices, matrices_of
from llmcompress.engine.source.open import open_checkpoint, source_headers
from llmcompress.engine.source.quantised import DecodedHeaders, decoded_headers, in_own_type
from llmcompress.engine.structure.source_model import OpenModel, open_model
from llmcompress.engine.train.trained import RANK, Weights
from llmcompress.engine.train.training import AT_ONCE, LEAST, held_back
from llmcompress.errors import CheckpointError, PlanError
from llmcompress.ledger import Ledger
from llmcompress.recipe import Calibration
from llmcompress.significant import significant
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.files import refuse_unwritable
from llmcompress.store.gguf_header import GgufHeader
from llmcompress.store.gguf_model import read_gguf
from llmcompress.store.headers import ModelHeaders, Stored, read_headers, read_json
from llmcompress.store.output import OutputDirectory
from llmcompress.store.output_file import OutputFile, beside, in_output, is_single
from llmcompress.store.side_files import has_tokenizer

_SHIPPED_TOKENS = 100_000  # that windows are drawn from at most: the shipped text has more by any tokenizer
_RATE = 1e-3  # of norms alone
_PRUNED_RATE = 3e-3  # where weights that stay are trained, which nothing has rounded
SHARE = 1 / 100  # of the mean relative error of the matrices: the rate, where none is asked for
MADE_FROM = "give the model it was made from: --ref"


class RecoverRequest(NamedTuple):
    """What a user asks for. steps: of training, each of AT_ONCE windows.

    rate: by which a step moves a logarithm at most; None for a share of what rounding has changed. weights: how those
    of models that lost some are trained. written: windows that the original writes itself, beside the calibration text.
    """

    steps: int
    rate: float | None = None
    weights: Weights = "low-rank"
    written: int = 0


@dataclass(frozen=True)
class RecoverPlan:
    """What a run will do. opened: the compressed model, or of a GGUF file, which has no config, the original.

    original, matrices: the model it was made from. gguf: of a file that is recovered; None for a directory.
    report: of the compressed model. other: shipped text, of which some is held back as of the text that is trained on;
    None where both are one, or nothing tells tokens of a text. memory_bytes, scratch_bytes: estimates.
    """

    opened: OpenModel
    original: ModelHeaders
    matrices: Matrices
    gguf: GgufWeights | None
    report: Mapping[str, Any]
    request: RecoverRequest
    other: Calibration | None
    memory_bytes: int
    scratch_bytes: int
    work: Path

    @property
    def checkpoint(self) -> Checkpoint:
        """The tensors of the compressed model by name."""
        return self.opened.checkpoint if self.gguf is None else self.gguf

    @property
    def path(self) -> Path:
        """The compressed model."""
        return self.opened.headers.path if self.gguf is None else self.gguf.header.path

    @property
    def nbytes(self) -> int:
        """Bytes of its weights; of a GGUF file all of it."""
        return self.stored.nbytes if self.gguf is None else self.path.stat().st_size

    @property
    def output(self) -> type[OutputDirectory]:
        """The kind of output that is written."""
        return OutputDirectory if self.gguf is None else OutputFile

    @property
    def rate(self) -> float:
        """The highest rate."""
        if self.request.rate is not None:
            return self.request.rate
        errors = [item["relative_error"] for item in self.report["linears"] if item["grid"]]
        if errors:
            return significant(SHARE * sum(errors) / len(errors), 2)
        return _PRUNED_RATE if self.learns_weights else _RATE

    @property
    def passes(self) -> float:
        """Passes of the text through a whole model, forward or back: one of the original, and those of training."""
        return 1 + 4 * AT_ONCE * self.request.steps / (self.opened.text.samples + self.request.written)

    @property
    def reshaped(self) -> bool:
        """Whether layers or channels were removed from the original."""
        return is_reshaped(self.report)

    @property
    def removed_layers(self) -> Sequence[int]:
        """The numbers of the layers that were removed from the original."""
        found: Sequence[int] = self.report.get("depth", {}).get("removed", ())
        return found

    @property
    def learns_weights(self) -> bool:
        """Whether weights of some matrix are trained."""
        return self.reshaped or (self.gguf is None and any(map(_left_by_pruning, self.report["linears"])))

    def learns_weights_of(self, module: str) -> bool:
        """Whether the weights of the matrix of a module are trained."""
        return self.reshaped or (self.gguf is None and _left_by_pruning(self.records.get(module, {})))

    @property
    def trains_each(self) -> bool:
        """Whether weights are trained each for itself."""
        return self.learns_weights and self.request.weights == "full"

    @property
    def learnt(self) -> int:
        """How many numbers are learnt of weights: the weights, or the factors of a change of low rank."""
        each = self.trains_each
        shapes = (
            self.opened.headers.tensors[f"{ref.module}.weight"].spec.shape
            for ref in self.opened.matrices.refs
            if self.learns_weights_of(ref.module)
        )
        return sum(prod(shape) if each else RANK * sum(shape) for shape in shapes)

    @cached_property
    def records(self) -> dict[str, Mapping[str, Any]]:
        """What the report says of each matrix, by its module."""
        return {item["name"]: item for item in self.report["linears"]}

    @cached_property
    def own(self) -> Mapping[str, Stored]:
        """The tensors of the decoded model, every matrix in the model's own type."""
        return in_own_type(self.opened.headers).tensors

    @property
    def identity(self) -> dict[str, Any]:
        """What a work directory says of its run; a later start goes on only where all of this is equal."""
        return {
            "recover": {**self.request._asdict(), "rate": self.rate},
            "text": [None if text is None else text.model_dump(mode="json") for text in (self.opened.text, self.other)],
            "model": self.original.contents,
            "compressed": self.report.get("sha256"),
            "compute_dtype": self.opened.resources.dtype,
            "batch": self.opened.resources.batch,
        }

    @property
    def stored(self) -> ModelHeaders:
        """The headers of the compressed model's files."""
        headers = self.opened.headers
        return headers.stored if isinstance(headers, DecodedHeaders) else headers


def plan_recover(
    compressed: Path, original: Path, request: RecoverRequest, text: Calibration, options: Options | None = None
) -> RecoverPlan:
    """Check from headers that one model was made from the other. Raises LlmcompressError."""
    options = options or Options()
    if text.samples < LEAST:
        raise PlanError(f"--samples {text.samples} leaves too few windows to hold some back", f"use {LEAST} or more")
    if text.source == "self":
        raise PlanError("text is not sampled for training", "give a text as --calibration, or the default")
    if is_single(original):
        raise PlanError(f"{original} is a GGUF file, which has no config.json to run it by", MADE_FROM)
    source = source_headers(original, Ledger())
    matrices = matrices_of(source, options.trust_remote_code, Ledger())
    file = _file(compressed) if is_single(compressed) else None
    headers = decoded_headers(read_headers(compressed)) if file is None else source
    report = _report(compressed)
    if file is not None:
        out = options.out or path_beside(compressed, "recovered.gguf")
        refuse_model_itself(out, compressed)
        options = replace(options, out=out)
    opened = open_model(headers, text, options, "recovered", OutputDirectory if file is None else OutputFile)
    refuse_model_itself(opened.out, original)
    if "adapter" in report:
        raise PlanError(f"an adapter was merged into {compressed}, so {original} is not what it was made from")
    if report["source"].get("headers_sha256") != source.fingerprint:
        raise CheckpointError(f"{compressed} was not made from {original}, by its report.json", MADE_FROM)
    _refuse_unlike(opened, source, is_reshaped(report))
    gguf = None if file is None else GgufWeights(file, open_checkpoint(source))
    return planned_recovery(opened, source, matrices, report, request, gguf)


def planned_recovery(
    opened: OpenModel,
    source: ModelHeaders,
    matrices: Matrices,
    report: Mapping[str, Any],
    request: RecoverRequest,
    gguf: GgufWeights | None = None,
) -> RecoverPlan:
    """The same of models that are open. Raises LlmcompressError."""
    text = opened.text
    enough = max(1, min(text.samples, _SHIPPED_TOKENS // text.length))
    shipped = Calibration(samples=enough, length=text.length, seed=text.seed)
    other = None if text.source == shipped.source or not has_tokenizer(source.path) else shipped
    windows = text.samples + request.written + (0 if other is None else len(held_back(other.samples)))
    scratch = windows * text.length * hidden_width(source) * opened.resources.item_bytes
    work = opened.options.work or opened.out.with_name(f"{opened.out.name}.work")
    refuse_unwritable(work)
    plan = RecoverPlan(opened, source, matrices, gguf, report, request, other, 0, scratch, work)
    learnt = plan.learnt
    plan = replace(plan, scratch_bytes=scratch + TRAINING_STATE * learnt)
    check_room((opened.out, plan.nbytes), (work, plan.scratch_bytes))
    memory = partial(
        recover_memory,
        _sizes(plan),
        at_once=AT_ONCE,
        learnt=learnt,
        gguf=gguf is not None,
        writer=ModelSizes.of(source, matrices.refs, text.length),
        written=request.written,
    )
    try:
        opened = opened.within_memory(memory)
    except PlanError as error:
        hint = f"{error.hint}, or use --weights low-rank" if plan.trains_each else error.hint
        raise PlanError(error.message, hint) from None
    return replace(plan, opened=opened, memory_bytes=memory(opened.resources).peak("host"))


def _file(compressed: Path) -> GgufHeader:
    """The header of a GGUF file; PlanError for one of several files of a model."""
    header = read_gguf(compressed)
    if len(header.files) > 1:
        hint = "write it again without --split-max-size"
        raise PlanError(f"{compressed} is one of {len(header.files)} files of a model, and one is written", hint)
    return header


def _sizes(plan: RecoverPlan) -> ModelSizes:
    """What memory is planned by; tensors of a GGUF file are decoded to float32."""
    sizes = plan.opened.sizes
    elements, _ = sizes.largest
    return sizes if plan.gguf is None else sizes._replace(largest=(elements, 4 * elements))


def is_reshaped(report: Mapping[str, Any]) -> bool:
    """Whether a report is of a model that lost layers or channels."""
    return bool(report.keys() & {"depth", "width"})


def _left_by_pruning(record: Mapping[str, Any]) -> bool:
    """Whether a matrix was pruned, and nothing has rounded it."""
    return "pruner" in record and record.get("grid") is None


def paper(compressed: Path, name: str) -> Path:
    """The path of a file that belongs to a compressed model, such as its report."""
    if not is_single(compressed):
        return compressed / name
    return compressed.with_name(name) if in_output(compressed) else beside(compressed, name)


def _report(compressed: Path) -> Mapping[str, Any]:
    """The report of an output; CheckpointError where there is none that tells of its files and matrices."""
    file = paper(compressed, "report.json")
    if not file.is_file():
        hint = "give a directory that llmcompress wrote, or a GGUF file with the report that was written beside it"
        raise CheckpointError(f"{compressed} has no {file.name}", hint)
    report = read_json(file)
    if is_single(compressed) and report.get("format") != "gguf":
        raise CheckpointError(f"{file} is not the report of a GGUF file", "compress the model again")
    parts = {"linears": list, "tensors": dict, "files": dict, "ledger": list, "source": dict}
    parts |= {} if is_reshaped(report) else {"recipe": dict}
    for name, kind in parts.items():
        if not isinstance(report.get(name), kind):
            raise CheckpointError(f"{file} does not tell of its {name}", "compress the model again, with this version")
    removed = report.get("depth", {"removed": []})
    removed = removed.get("removed") if isinstance(removed, Mapping) else None
    if not isinstance(removed, list) or not all(isinstance(number, int) for number in removed):
        raise CheckpointError(f"{file} does not tell which layers were removed", "remove them again, with this version")
    kinds = {"name": str, "grid": str | None, "relative_error": float | int}
    for item in report["linears"]:
        if not isinstance(item, Mapping) or not all(isinstance(item.get(key), kind) for key, kind in kinds.items()):
            raise CheckpointError(f"{file} has a record of a matrix that cannot be used", "compress the model again")
    return report


def _refuse_unlike(opened: OpenModel, source: ModelHeaders, reshaped: bool) -> None:
    """CheckpointError for a tensor of a layer that only one of the models has, or in another shape.

    reshaped: whether it is layers that may be so, and nothing else.
    """
    inside = numbered(opened.matrices.prefix)
    for name, stored in opened.headers.tensors.items():
        other = source.tensors.get(name)
        if (inside.match(name) is None) == reshaped and (other is None or other.spec.shape != stored.spec.shape):
            raise CheckpointError(
                f"{opened.headers.path} has another structure than {source.path}: {name} is not the same in both",
                MADE_FROM,
            )
