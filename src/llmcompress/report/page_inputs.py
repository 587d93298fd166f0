"""The inputs of a page: reports of outputs, evaluations matched by hash of a report, timings matched by run."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from llmcompress.engine.write.report_schema import Finished, GradientsDone, LayerDone, Report, Timing, TimingLine
from llmcompress.engine.write.timings import run_sha256
from llmcompress.errors import CheckpointError
from llmcompress.report.parts import parts_of
from llmcompress.store.headers import read_json
from llmcompress.validate.evaluation import Evaluation, report_beside
from llmcompress.validate.gguf_file import gguf_in
from llmcompress.validate.long_evaluation import LongEvaluation
from llmcompress.validate.task_evaluation import TaskEvaluation

Model = TypeVar("Model", bound=BaseModel)
AnyEvaluation = Evaluation | TaskEvaluation | LongEvaluation

_TIMING: TypeAdapter[TimingLine] = TypeAdapter(Timing)
_LARGEST = 1 << 28  # bytes of a file of timings


@dataclass
class Timed:
    """Times of a run over all its starts; a start from nothing discards earlier times. layers: by number."""

    gradients: GradientsDone | None = None
    layers: dict[int, LayerDone] = field(default_factory=dict)
    end: Finished | None = None

    def add(self, line: TimingLine) -> None:
        if isinstance(line, LayerDone):
            self.layers[line.layer] = line
        elif isinstance(line, Finished):
            self.end = line
        elif isinstance(line, GradientsDone):
            self.gradients = line
        elif line.done == 0:
            self.gradients, self.layers, self.end = None, {}, None

    @property
    def seconds(self) -> float:
        """Seconds of the gradients, of all layers and of writing."""
        before = self.gradients.seconds if self.gradients else 0.0
        return before + sum(layer.seconds for layer in self.layers.values()) + (self.end.writing if self.end else 0.0)

    @property
    def peak(self) -> int:
        """Peak memory of the process in bytes."""
        others = (line.peak_memory_bytes for line in (self.gradients, self.end) if line is not None)
        return max([*(line.peak_memory_bytes for line in self.layers.values()), *others], default=0)


@dataclass(frozen=True)
class ReportedOutput:
    """An output with its evaluations and times.

    name: its directory or file. sha256: of its report.json. parts: bytes of each part of the model, if its weights are
    there. answers: its evaluations on tasks; long: those in long text.
    """

    name: str
    sha256: str
    report: Report
    evaluations: tuple[Evaluation, ...]
    timed: Timed | None
    parts: Mapping[str, int] = field(default_factory=dict)
    answers: tuple[TaskEvaluation, ...] = ()
    long: tuple[LongEvaluation, ...] = ()


def read_outputs(paths: Sequence[Path], evaluations: Sequence[Path], timings: Sequence[Path]) -> list[ReportedOutput]:
    """Outputs with their evaluations and times. CheckpointError for an unreadable file, or one of no output."""
    found = [_read_report(path) for path in paths]
    twice = [str(path) for path, count in Counter(path.resolve() for path in paths).items() if count > 1]
    if twice:
        raise CheckpointError(f"{twice[0]} is given twice")
    evaluated = evaluations_by_report(evaluations, {digest for digest, _, _ in found})
    timed = _by_run(timings, {run for _, run, _ in found})
    names = _names(paths)
    return [
        ReportedOutput(
            name,
            digest,
            report,
            tuple(one for one in evaluated.get(digest, ()) if isinstance(one, Evaluation)),
            timed.get(run),
            parts_of(path),
            tuple(one for one in evaluated.get(digest, ()) if isinstance(one, TaskEvaluation)),
            tuple(one for one in evaluated.get(digest, ()) if isinstance(one, LongEvaluation)),
        )
        for path, name, (digest, run, report) in zip(paths, names, found, strict=True)
    ]


def _names(paths: Sequence[Path]) -> list[str]:
    """A name for each output; outputs of one name are numbered."""
    names = [path.resolve().name for path in paths]
    seen, result = Counter[str](), []
    for name in names:
        seen[name] += 1
        result.append(name if names.count(name) == 1 else f"{name} ({seen[name]})")
    return result


def _read_report(path: Path) -> tuple[str, str, Report]:
    """SHA-256 of a report, SHA-256 of the report's run, and the report."""
    file = report_beside(gguf_in(path) or path)
    if not file.is_file():
        raise CheckpointError(
            f"{path} is not an output: there is no {file.name}", "give directories or GGUF files llmcompress wrote"
        )
    data, report = _read(file, Report, "run again, or use the llmcompress that wrote it")
    run = run_sha256(data["source"]["headers_sha256"], data["recipe"], data["compute_dtype"])
    return sha256(file.read_bytes()).hexdigest(), run, report


def evaluations_by_report(files: Sequence[Path], known: set[str]) -> dict[str, list[AnyEvaluation]]:
    """Evaluations, on texts, on tasks and in long text, by the report of the output that was evaluated."""
    result: dict[str, list[AnyEvaluation]] = {}
    for file in files:
        found: AnyEvaluation
        keys = read_json(file)
        model: type[AnyEvaluation] = Evaluation
        if "asked" in keys or "needles" in keys:
            model = TaskEvaluation if "asked" in keys else LongEvaluation
        _, found = _read(file, model, "evaluate again with `llmcompress eval --output`")
        if found.model.report_sha256 not in known:
            raise CheckpointError(
                f"evaluation {file} is of another checkpoint, {found.model.name}",
                "give that output as well, or evaluate this one with `llmcompress eval --output`",
            )
        result.setdefault(str(found.model.report_sha256), []).append(found)
    return result


def _by_run(files: Sequence[Path], known: set[str]) -> dict[str, Timed]:
    """Times by run. One file may hold many runs, one of which at least must be known."""
    result: dict[str, Timed] = {}
    for file in files:
        runs = set()
        for line in _lines(file):
            runs.add(line.run)
            result.setdefault(line.run, Timed()).add(line)
        if not runs & known:
            raise CheckpointError(f"timings {file} are of no output given", "give the file of --timings of their run")
    return result


def _lines(file: Path) -> Iterator[TimingLine]:
    try:
        if file.exists() and (not file.is_file() or file.stat().st_size > _LARGEST):
            raise CheckpointError(f"{file} is no file of timings")
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            yield _TIMING.validate_json(line)
        except ValidationError as error:
            raise CheckpointError(f"{file} is no file of timings: line {number}: {_first(error)}") from None


def _read(file: Path, model: type[Model], hint: str) -> tuple[dict[str, Any], Model]:
    """The data of a JSON file and the document; CheckpointError for another version, or no version."""
    data = read_json(file)
    version, written = data.get("schema_version"), data.get("llmcompress")
    if "llmcompress" in data and version != 1:
        which = "an older" if version is None else f"another (schema version {version!r}, not 1)"
        raise CheckpointError(f"{file} was written by {which} llmcompress, {written!r}", hint)
    return data, _validated(file, data, model, hint)


def read_document(file: Path, model: type[Model], hint: str) -> Model:
    """A JSON document without a version; CheckpointError if the file does not fit `model`."""
    return _validated(file, read_json(file), model, hint)


def _validated(file: Path, data: dict[str, Any], model: type[Model], hint: str) -> Model:
    try:
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        what = str(model.model_config.get("title") or model.__name__.lower())
        raise CheckpointError(f"{file} is no {what}, or damaged: {_first(error)}", hint) from None


def _first(error: ValidationError) -> str:
    """The first fault and its place in the document."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg'].lower()}" if place else first["msg"].lower()
