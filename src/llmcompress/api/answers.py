"""How many items of tasks a compressed model answers: what `eval --tasks` does."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmcompress.api.evaluation import NOTHING_KEPT, refuse_broken, save_document
from llmcompress.api.quiet import quiet_libraries
from llmcompress.api.steps import Watch, watched
from llmcompress.engine.process.ranks import refuse_several
from llmcompress.errors import RecipeError

if TYPE_CHECKING:
    from llmcompress.validate.evaluate import Gate
    from llmcompress.validate.request import Request
    from llmcompress.validate.task_files import Task


@dataclass(frozen=True)
class Questions:
    """Where tasks are from, how many items of each, examples before each item, and whether in a chat."""

    place: str
    items: int | None = None
    shots: int = 0
    chat: bool = False


@dataclass(frozen=True)
class TasksResult:
    """Shares of items that a model answers right.

    figures: over all items by name, those ending in `_ci` are 95% intervals; tasks: the same of each task. document:
    what `eval --tasks --output` saves.
    """

    document: Mapping[str, Any] = field(repr=False)

    @property
    def figures(self) -> Mapping[str, Any]:
        """Over all items: `acc`, `loglikelihood`, and with a reference `ref_acc`, `acc_drop`, `acc_p` and others."""
        figures: Mapping[str, Any] = self.document["figures"]
        return figures

    @property
    def tasks(self) -> Mapping[str, Mapping[str, Any]]:
        """The figures of each task by its name."""
        tasks: Mapping[str, Mapping[str, Any]] = self.document["tasks"]
        return tasks

    def fail_if(self, *conditions: str) -> None:
        """GateError for figures that are not finite, or for the first condition that is true.

        RecipeError for a condition on a figure that was not measured.

        >>> answers.fail_if("acc_drop > 0.5")
        """
        from llmcompress.validate.evaluate import parse_gate

        gates = [parse_gate(text) for text in conditions]
        refuse_unmeasured_shares(gates, "acc_drop" in self.figures, "acc_norm" in self.figures)
        refuse_broken(self.figures, gates)

    def save(self, file: str | Path, *, overwrite: bool = False) -> None:
        """Write the document as JSON. PlanError for a file that exists, without `overwrite`.

        GateError for figures that are not finite, which JSON cannot say.

        >>> answers.save("model-w4.tasks.json")
        """
        save_document(self.document, file, overwrite)


def refuse_unmeasured_shares(gates: "Iterable[Gate]", compared: bool, by_characters: bool) -> None:
    """RecipeError for a gate of a figure that is not measured. by_characters: whether `acc_norm` is defined."""
    from llmcompress.validate.evaluate import refuse_unmeasured
    from llmcompress.validate.tasks import ALONE, COMPARED

    alone, with_reference = (
        [name for name in names if by_characters or "acc_norm" not in name] for names in (ALONE, COMPARED)
    )
    refuse_unmeasured(gates, compared, alone, with_reference)


def evaluate_tasks(
    model: str | Path,
    ref: str | Path | None = None,
    tasks: str | Path = "default",
    *,
    items: int | None = None,
    shots: int = 0,
    chat: bool = False,
    batch: int = 4,
    device: str = "auto",
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    adapter: str | Path | None = None,
    ref_adapter: str | Path | None = None,
    kv_bits: int | None = None,
    kv_type: Literal["int", "fp8", "nvfp4"] | None = None,
    kv: str | None = None,
    trust_remote_code: bool = False,
    progress: Watch | None = None,
    stop: Callable[[int], bool] | None = None,
) -> TasksResult:
    """How many items of tasks a model answers right, and how many of those its original `ref` does.

    tasks: "default" (shipped with llmcompress), a file or a folder. items: the first so many of each task. shots:
    worked examples before each item. chat: ask through the chat template. batch: inputs run at once. kv: evict a share
    of the cached keys and values of each prompt before its answer; without `ref` the model is compared with itself. The
    others are those of `evaluate`. Raises LlmcompressError.

        >>> answers = llmcompress.evaluate_tasks("model-w4", "model", items=2)
        >>> sorted(answers.tasks)
        ['cloze', 'questions', 'stories', 'written']
    """
    from llmcompress.validate.omission import omissions_of
    from llmcompress.validate.request import Request, with_omission

    refuse_several("evaluate_tasks() of Python")
    omissions = omissions_of(kv)
    if len(omissions) > 1:
        raise RecipeError("evaluate_tasks() measures one eviction at a time", "call it once for each")
    request = Request.given(
        model,
        ref,
        batch=batch,
        device=device,
        compute_dtype=compute_dtype,
        adapter=adapter,
        ref_adapter=ref_adapter,
        kv_bits=kv_bits,
        kv_type=kv_type,
        trust_remote_code=trust_remote_code,
    )
    request = with_omission(request, *omissions)
    questions = Questions(str(tasks), items, shots, chat)
    return answered(request, questions, read_questions(request, questions), progress, stop)


def read_questions(request: "Request", questions: Questions) -> "list[Task]":
    """The tasks. What models cannot be asked is refused before they are read."""
    from llmcompress.validate.session import check_models
    from llmcompress.validate.task_files import read_tasks
    from llmcompress.validate.task_prompts import tokenizer_of

    check_models(request)
    if questions.chat:
        tokenizer_of(request, chat=True)
    return read_tasks(questions.place, questions.items, questions.shots)


def answered(
    request: "Request",
    questions: Questions,
    tasks: "Sequence[Task]",
    progress: Watch | None = None,
    stop: Callable[[int], bool] | None = None,
) -> TasksResult:
    """The result of having tasks answered."""
    from llmcompress.validate.task_evaluation import task_evaluation
    from llmcompress.validate.tasks import task_figures

    with quiet_libraries():
        found = task_figures(request, tasks, watched(progress, stop, NOTHING_KEPT), questions.chat)
    return TasksResult(task_evaluation(request, questions.place, tasks, questions.shots, questions.chat, found))
