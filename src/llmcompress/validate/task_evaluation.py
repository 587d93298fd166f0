"""The JSON document of how many items of tasks a model answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from llmcompress import __version__
from llmcompress.engine.write.report_schema import Count, Document, Positive, Sha256, Share
from llmcompress.validate.evaluation import DTYPE, EVALUATION_SCHEMA, Evaluated, evaluated_model

if TYPE_CHECKING:
    from llmcompress.validate.request import Request
    from llmcompress.validate.task_files import Task

Ends = Annotated[list[float], Field(min_length=2, max_length=2)]


class TaskFigures(Document):
    """Figures over items; `_ci`: 95% interval; `_drop`: the reference's less the model's."""

    items: Positive
    acc: Share = Field(description="share of items answered right")
    acc_ci: Ends
    acc_norm: Share | None = Field(None, description="the same, choices judged by log-likelihood per character")
    acc_norm_ci: Ends | None = None
    loglikelihood: float = Field(description="of the right answer, mean over items, nats")
    loglikelihood_ci: Ends
    ref_acc: Share | None = None
    ref_acc_ci: Ends | None = None
    ref_acc_norm: Share | None = None
    ref_acc_norm_ci: Ends | None = None
    ref_loglikelihood: float | None = None
    ref_loglikelihood_ci: Ends | None = None
    acc_drop: float | None = None
    acc_drop_ci: Ends | None = None
    acc_norm_drop: float | None = None
    acc_norm_drop_ci: Ends | None = None
    loglikelihood_drop: float | None = None
    loglikelihood_drop_ci: Ends | None = None
    acc_p: Share | None = Field(None, description="McNemar's exact test of acc against ref_acc")
    same_answer: Share | None = Field(None, description="share of items that both answer alike")
    same_answer_ci: Ends | None = None


class AskedTasks(Document):
    """What was asked."""

    name: str = Field(description="'default', or what the file or folder is called")
    items_sha256: Sha256 = Field(description="of all that models read and what was right")
    shots: Count = Field(description="worked examples before each item")
    chat: bool = Field(description="whether questions went through the chat template")
    omitted: str | None = Field(None, description="what was left out of the model as it ran, and in how many layers")


class TaskEvaluation(Document):
    """What `eval --tasks --output` saves."""

    schema_version: Literal[1]
    llmcompress: str
    model: Evaluated
    reference: Evaluated | None
    asked: AskedTasks
    compute_dtype: str
    figures: TaskFigures = Field(description="over the items of all tasks")
    tasks: dict[str, TaskFigures] = Field(description="by name of the task")


def task_evaluation(
    request: "Request", place: str, tasks: "Sequence[Task]", shots: int, chat: bool, found: Mapping[str, Any]
) -> dict[str, Any]:
    """The document of the figures of `task_figures`. place: where the tasks are from."""
    return {
        "schema_version": EVALUATION_SCHEMA,
        "llmcompress": __version__,
        "model": evaluated_model(request.model),
        "reference": None if request.ref is None else evaluated_model(request.ref),
        "asked": {
            "name": place if place == "default" else Path(place).resolve().name,
            "items_sha256": _sha256(tasks),
            "shots": shots,
            "chat": chat,
            **{name: found[name] for name in ("omitted",) if name in found},
        },
        "compute_dtype": request.dtype or DTYPE,
        "figures": {name: value for name, value in found.items() if name not in ("tasks", "omitted")},
        "tasks": found["tasks"],
    }


def _sha256(tasks: "Sequence[Task]") -> str:
    """The hash of all items, wherever they are from."""
    items = [[asdict(replace(item, where="")) for item in task.items] for task in tasks]
    return sha256(json.dumps(items).encode()).hexdigest()
