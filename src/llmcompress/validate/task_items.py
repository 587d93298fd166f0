"""The items of tasks: what a model reads, what it may go on with, and which of these is right.

The columns of a row say whose layout it is in. Prompts and continuations are those of lm-evaluation-harness 0.4, whose
scores ours equal: a space stands between a prompt and a choice.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from re import sub
from typing import Annotated, Any, ClassVar

import regex
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmcompress.errors import CalibrationError

_SECONDS = 1  # for a regular expression of a stranger
HINT = "docs/cli.md shows the columns of the tasks that are known"


@dataclass(frozen=True)
class Written:
    """How a text that a model writes is judged: by the last match of a regular expression, against an answer.

    A match is its first group that took part, or all of it where there is no group. stops: texts at which writing ends,
    left out; most: tokens after which it ends anyway. ignored: regular expressions taken out of match and answer, which
    are compared without regard to case and to space around them.
    """

    pattern: str
    answer: str
    stops: Sequence[str]
    most: int
    ignored: Sequence[str] = ()

    def right(self, text: str) -> bool:
        """Whether a text has the answer. TimeoutError for a pattern that takes too long, `regex.error` for none."""
        cut = min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=len(text))
        matches = list(regex.finditer(self.pattern, text[:cut], timeout=_SECONDS))
        if not matches:
            return False
        taken = next((group for group in matches[-1].groups() if group), matches[-1][0])
        return self._plain(taken) == self._plain(self.answer)

    def _plain(self, text: str) -> str:
        for pattern in self.ignored:
            text = regex.sub(pattern, "", text, timeout=_SECONDS)
        return text.strip().casefold()


@dataclass(frozen=True)
class Item:
    """where: its place, in words. pairs: what is read, and what may follow. answer: the pair that is right.

    lengths: characters of the choices, by which log-likelihoods are divided for `acc_norm`; None where that is not
    defined. An item with one pair asks whether the model writes it; what it writes is judged by `written`, if given.
    about: read before all else, in a chat as the system's; shots: worked examples, read after it.
    fixed: whether nothing may be put around what is read.
    """

    where: str
    pairs: Sequence[tuple[str, str]]
    answer: int
    lengths: Sequence[int] | None
    written: Written | None = None
    about: str = ""
    shots: str = ""
    fixed: bool = False


class TaskRow(BaseModel):
    """A row of a file of items. ValueError where its values contradict each other.

    spare: how many more examples are drawn at random for an item than it gets; None where the first ones are taken.
    """

    model_config = ConfigDict(coerce_numbers_to_str=True)
    columns: ClassVar[frozenset[str]]
    spare: ClassVar[int | None] = None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.columns = frozenset(name for name, field in cls.model_fields.items() if field.is_required())

    @abstractmethod
    def item(self, where: str) -> Item: ...


def _chosen(where: str, prompt: str, choices: Sequence[str], answer: int) -> Item:
    """One prompt, and choices after a space."""
    if len(choices) < 2:
        raise ValueError("it has fewer than two choices")
    if not 0 <= answer < len(choices):
        raise ValueError(f"its answer is {answer}, of {len(choices)} choices counted from 0")
    return Item(where, [(prompt, f" {choice}") for choice in choices], answer, [len(choice) for choice in choices])


class Question(TaskRow):
    """Our own layout of multiple choice."""

    question: str
    choices: list[str]
    answer: int

    def item(self, where: str) -> Item:
        return _chosen(where, self.question, self.choices, self.answer)


class Mmlu(Question):
    """MMLU, one subject in a file or all: choices are letters."""

    subject: str

    def item(self, where: str) -> Item:
        letters = "ABCDEFGHIJ"[: len(self.choices)]
        listed = "".join(f"\n{letter}. {choice}" for letter, choice in zip(letters, self.choices, strict=False))
        about = f"The following are multiple choice questions (with answers) about {self.subject.replace('_', ' ')}."
        item = _chosen(where, f"{self.question.strip()}{listed}\nAnswer:", letters, self.answer)
        return replace(item, about=f"{about}\n\n")


class LabelledChoices(BaseModel):
    """The choices of ARC."""

    text: list[str]
    label: list[str]


class Arc(TaskRow):
    """ARC, easy or challenge."""

    spare = 0

    question: str
    choices: LabelledChoices
    answerKey: str  # noqa: N815 (the column's name)

    def item(self, where: str) -> Item:
        if self.answerKey not in self.choices.label:
            raise ValueError(f"its answerKey {self.answerKey!r} is none of its labels")
        answer = self.choices.label.index(self.answerKey)
        return _chosen(where, f"Question: {self.question}\nAnswer:", self.choices.text, answer)


class HellaSwag(TaskRow):
    """HellaSwag: which ending goes on."""

    spare = 1

    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: list[str]
    label: int

    def item(self, where: str) -> Item:
        prompt = _without_brackets(f"{self.activity_label}: {self.ctx_a} {self.ctx_b.capitalize()}")
        return _chosen(where, prompt, [_without_brackets(ending) for ending in self.endings], self.label)


def _without_brackets(text: str) -> str:
    """Text of WikiHow without its marks."""
    return sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


class Piqa(TaskRow):
    """PIQA: which of two solutions reaches a goal."""

    spare = 1

    goal: str
    sol1: str
    sol2: str
    label: int

    def item(self, where: str) -> Item:
        return _chosen(where, f"Question: {self.goal}\nAnswer:", [self.sol1, self.sol2], self.label)


class WinoGrande(TaskRow):
    """WinoGrande: which of two words fills a blank, judged by what follows it."""

    spare = 1

    sentence: str
    option1: str
    option2: str
    answer: int

    def item(self, where: str) -> Item:
        before, blank, after = self.sentence.partition("_")
        if not blank or self.answer not in (1, 2):
            raise ValueError(
                "its sentence has no blank '_'" if not blank else f"its answer is {self.answer}, not 1 or 2"
            )
        pairs = [(before + option, f" {after.strip()}") for option in (self.option1, self.option2)]
        return Item(where, pairs, self.answer - 1, None)


class Cloze(TaskRow):
    """Our own layout of a text that is to be finished."""

    text: str
    target: str

    def item(self, where: str) -> Item:
        gap = "" if self.target[:1].isspace() or self.text[-1:].isspace() else " "
        return Item(where, [(self.text, gap + self.target)], 0, None)


class Prompted(TaskRow):
    """Our own layout of a text that is written after a prompt, and judged by a regular expression."""

    prompt: str
    pattern: str
    answer: str
    stops: list[Annotated[str, Field(min_length=1)]] = ["\n\n"]
    most: int = Field(64, ge=1, le=1 << 16)

    def item(self, where: str) -> Item:
        written = Written(self.pattern, self.answer, self.stops, self.most)
        return _to_write(where, self.prompt, self.answer, written)


class Gsm8k(TaskRow):
    """GSM8K: the last number that is written, as its flexible-extract has it."""

    spare = 0

    question: str
    answer: str

    def item(self, where: str) -> Item:
        *_, number = self.answer.partition("####")
        if not number.strip():
            raise ValueError("its answer has no number after '####'")
        written = Written(
            r"(-?[$0-9.,]{2,})|(-?[0-9]+)", number, ("Question:", "</s>", "<|im_end|>"), 256, (",", r"\$", r"\.$")
        )
        return _to_write(where, f"Question: {self.question}\nAnswer:", self.answer, written)


def _to_write(where: str, prompt: str, answer: str, written: Written) -> Item:
    try:
        written.right(written.answer)
    except (regex.error, TimeoutError) as error:
        raise ValueError(f"its pattern cannot be used: {error}") from None
    gap = "" if answer[:1].isspace() or prompt[-1:].isspace() else " "
    return Item(where, [(prompt, gap + answer)], 0, None, written)


class LoggedSample(TaskRow):
    """A sample as lm-evaluation-harness exports it with --log_samples."""

    doc_id: int
    doc: dict[str, Any]
    target: str
    arguments: dict[str, dict[str, Any]]

    def item(self, where: str) -> Item:
        pairs = [(asked.get("arg_0"), asked.get("arg_1")) for asked in self.arguments.values()]
        if not all(isinstance(part, str) for pair in pairs for part in pair):
            raise ValueError("it asks for generated text, not for the likelihood of a text")
        said: list[tuple[str, str]] = pairs  # type: ignore[assignment]
        if len(said) == 1:
            return Item(where, said, 0, None, fixed=True)
        if len({prompt for prompt, _ in said}) > 1:  # its target is the text that follows, and not a choice
            return replace(item_of(f"{where}, doc", self.doc), pairs=said, about="", fixed=True)
        if not self.target.isdigit() or int(self.target) >= len(said):
            raise ValueError(f"its target {self.target!r} is none of its {len(said)} choices")
        lengths = [len(choice.removeprefix(" ")) for _, choice in said]
        return Item(where, said, int(self.target), lengths, fixed=True)


# a row is in the first of these whose columns it has
TASK_ROWS: tuple[type[TaskRow], ...] = (
    *(LoggedSample, WinoGrande, HellaSwag, Piqa, Mmlu, Question, Arc, Cloze, Prompted, Gsm8k),
)


def layout_of(where: str, row: Mapping[str, Any]) -> type[TaskRow]:
    """The layout that a row is in. CalibrationError for a row that is in none."""
    present = {name for name, value in row.items() if value is not None}
    layout = next((layout for layout in TASK_ROWS if layout.columns <= present), None)
    if layout is None:
        raise CalibrationError(f"{where} is no item of a task: it has {', '.join(sorted(present)) or 'nothing'}", HINT)
    return layout


def item_of(where: str, row: Mapping[str, Any]) -> Item:
    """A row as an item, checked. CalibrationError for what is none."""
    try:
        item = layout_of(where, row).model_validate(dict(row)).item(where)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        at = ".".join(map(str, first["loc"]))
        raise CalibrationError(f"{where}: {at}: {first['msg'][:1].lower()}{first['msg'][1:]}", HINT) from None
    except ValueError as error:
        raise CalibrationError(f"{where}: {error}", HINT) from None
    for prompt, choice in item.pairs:
        if not prompt.strip() or not choice.strip():
            raise CalibrationError(f"{where} has an empty {'choice' if prompt.strip() else 'prompt'}", "fill it")
    return item
