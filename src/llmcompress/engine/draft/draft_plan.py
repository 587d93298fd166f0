"""Planning a draft head: its sizes, by the target's config, and what training it takes."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from llmcompress.engine.plan.pass_memory import draft_memory
from llmcompress.engine.plan.paths import check_room
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.source.header_checks import hidden_width, vocabulary_size
from llmcompress.engine.source.open import config_of
from llmcompress.engine.source.quantised import DecodedHeaders, decoded_headers
from llmcompress.engine.structure.source_model import OpenModel, open_model
from llmcompress.engine.train.training import LEAST, ONE_OF
from llmcompress.errors import PlanError
from llmcompress.formats.base import TensorSpec
from llmcompress.model.draft_heads.base import DraftShape, HeadKind, HeadTarget
from llmcompress.model.draft_heads.head_files import head_kinds
from llmcompress.recipe import Calibration
from llmcompress.store.files import refuse_unwritable
from llmcompress.store.headers import ModelHeaders, read_headers
from llmcompress.store.side_files import has_tokenizer

GUESSES = 4  # tokens drafted at a time, where nobody says how many


class DraftRequest(NamedTuple):
    """What a user asks for. kind: of head. steps: of training, each of AT_ONCE windows.

    vocabulary: most tokens that can be drafted. written: windows that the model writes itself, beside the calibration
    text. rate: the highest.
    """

    kind: str
    steps: int
    vocabulary: int
    written: int
    rate: float


@dataclass(frozen=True)
class DraftPlan:
    """What a run will do. opened: the target. shape: of its head. memory_bytes, scratch_bytes: estimates."""

    opened: OpenModel
    shape: DraftShape
    request: DraftRequest
    dtype: str
    memory_bytes: int
    scratch_bytes: int
    work: Path

    @property
    def kind(self) -> HeadKind:
        return head_kinds()[self.request.kind]

    @property
    def specs(self) -> list[TensorSpec]:
        return self.shape.specs(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the head's tensors."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def share(self) -> float:
        """Weights of the head as a share of the target's."""
        own = sum(prod(shape) for shape in self.shape.matrices.values())
        return own / sum(prod(stored.spec.shape) for stored in self.opened.headers.tensors.values())

    @property
    def identity(self) -> dict[str, Any]:
        """What a work directory says of its run; a later start goes on only where all of this is equal."""
        return {
            "draft": self.request._asdict(),
            "shape": asdict(self.shape) | {"states": list(self.shape.states)},
            "text": self.opened.text.model_dump(mode="json"),
            "model": stored(self.opened.headers).contents,
            "compute_dtype": self.opened.resources.dtype,
            "batch": self.opened.resources.batch,
        }


def plan_draft(model: Path, request: DraftRequest, text: Calibration, options: Options | None = None) -> DraftPlan:
    """Check from headers that a head can be trained for a model. Raises LlmcompressError."""
    options = options or Options()
    refuse_text(model, text, request.written)
    kind = head_kinds()[request.kind]
    drafted = max(kind.depths, GUESSES)
    if text.length <= drafted:
        raise PlanError(
            f"windows of {text.length} tokens have none that is judged after {drafted} drafted ones",
            "use a longer --length",
        )
    opened = open_model(decoded_headers(read_headers(model)), text, options, "draft")
    embedding = _embedding(opened)
    shape = kind.shape(_target(opened), request.vocabulary)
    windows = text.samples + request.written
    numbers = len({*shape.states, opened.matrices.layers})
    scratch = windows * text.length * shape.hidden * opened.resources.item_bytes * (numbers + 2)
    work = options.work or opened.out.with_name(f"{opened.out.name}.work")
    refuse_unwritable(work)
    learnt = sum(prod(part) for part in shape.matrices.values())
    plan = DraftPlan(opened, shape, request, embedding.dtype, 0, scratch + 16 * learnt, work)  # and what Adam keeps
    check_room((opened.out, plan.nbytes), (work, plan.scratch_bytes))
    written = request.written
    memory = partial(draft_memory, opened.sizes, head=shape, learnt=learnt, depths=kind.depths, written=written)
    opened = opened.within_memory(memory)
    return replace(plan, opened=opened, memory_bytes=memory(opened.resources).peak("host"))


def refuse_text(model: Path, text: Calibration, written: int) -> None:
    """PlanError for windows of which none can be held back, and for text that a model cannot write. written: windows
    that it is to write beside `text`."""
    if text.source == "self":
        raise PlanError("the model's own text comes beside another", f"write --written {text.samples} in its place")
    if text.samples < ONE_OF or text.samples + written < LEAST:
        raise PlanError(
            f"--samples {text.samples} and --written {written} leave too few windows to hold some back",
            f"use --samples {LEAST} or more",
        )
    if written and not has_tokenizer(model):
        raise PlanError(f"{model} has no tokenizer, without which it writes no text", "use --written 0")


def stored(headers: ModelHeaders) -> ModelHeaders:
    """The headers of a model's files."""
    return headers.stored if isinstance(headers, DecodedHeaders) else headers


def _embedding(opened: OpenModel) -> TensorSpec:
    """The table of the embedding; PlanError unless its rows are as wide as hidden states."""
    name = opened.anatomy.outer(opened.matrices.spec.embed) or opened.anatomy.outer(opened.matrices.spec.head)
    width = hidden_width(opened.headers)
    if name is None or opened.headers.tensors[name].spec.shape[-1] != width:
        raise PlanError(f"{opened.headers.path} has no embedding as wide as its {width} channels, as a head needs one")
    return opened.headers.tensors[name].spec


def _target(opened: OpenModel) -> HeadTarget:
    headers = opened.headers
    config = config_of(headers, opened.options.trust_remote_code).get_text_config()
    return HeadTarget(headers.path, config, opened.matrices.layers, hidden_width(headers), vocabulary_size(headers))
