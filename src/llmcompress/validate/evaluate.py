"""How far a compressed model is from its original: both run in lockstep, one layer of each in memory at a time."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcompress.errors import CalibrationError, RecipeError
from llmcompress.hardware import at_once
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.registry import suggest
from llmcompress.validate.reference_cache import ReferenceCache
from llmcompress.validate.token_statistics import ALONE, COMPARED, OPERATORS, Array, Tokens, shown

Watch = Callable[[int, int], None]
Rows = Callable[[int, int], list[Tensor]]
"""Logits float32 [tokens, vocabulary] of each model, from a token of a text up to another, which is left out."""

_PIECE = 128  # tokens whose logits, over the whole vocabulary, are in memory at once
_COMPARED = 16  # tokens whose logits a processor goes over many times: fewer of them stay nearer to it


def cut_windows(ids: list[int], length: int, windows: int, origin: str) -> Tensor:
    """The first `windows` disjoint windows [windows, length] int64 of a text tokenised once; the tail is dropped."""
    available = len(ids) // length
    if available < windows:
        raise CalibrationError(
            f"{origin} gives {available} windows of {length} tokens, {windows} were asked for",
            f"use --windows {available} or a shorter --length" if available else "give more text",
        )
    return torch.tensor(ids[: windows * length], dtype=torch.int64).view(windows, length)


def amount(windows: Tensor) -> str:
    """How much is run, in words. windows: [windows, length]."""
    return f"{len(windows)} windows of {windows.shape[1]} tokens"


def measure(
    subject: StreamedModel,
    reference: StreamedModel | None,
    ids: Tensor,
    batch: int = 4,
    watch: Watch = lambda done, of: None,
) -> Tokens:
    """Per-token figures of `subject` on windows [windows, length], against `reference` if there is one.

    Every position but the first of a window is scored, in float32 on the full vocabulary.
    """
    return measure_several([subject], reference, ids, batch, watch)[0]


def measure_several(
    subjects: Sequence[StreamedModel],
    reference: StreamedModel | None,
    ids: Tensor,
    batch: int = 4,
    watch: Watch = lambda done, of: None,
    kept: ReferenceCache | None = None,
) -> list[Tokens]:
    """What `measure` gives for each of several models, from one pass of their reference. kept: of the reference."""
    collected = [Collected() for _ in subjects]
    models = [*subjects, *([] if reference is None else [reference])]
    for window, rows in zip(ids, lockstep(models, torch.split(ids, batch), watch, kept), strict=True):
        scored = len(window) - 1
        for start in range(0, scored, _PIECE):
            stop = min(start + _PIECE, scored)
            logits = rows(start, stop)
            for one, own in zip(collected, logits, strict=False):
                one.add([own, *logits[len(subjects) :]], window[start + 1 : stop + 1])
    return [one.tokens(len(ids)) for one in collected]


class Collected:
    """Measurements of windows, one after another."""

    def __init__(self) -> None:
        self._found: dict[str, list[Array]] = {}

    def add(self, logits: list[Tensor], truth: Tensor) -> None:
        """Measure some tokens of a window, `truth` [tokens], by what is predicted of each.

        logits: float32 [tokens, vocabulary] of the subject and of any reference.
        """
        step = at_once(logits[0], _COMPARED)
        for start in range(0, len(truth), step):
            logs = [values[start : start + step].log_softmax(dim=-1) for values in logits]
            for name, value in _compare(logs, truth[start : start + step].to(logs[0].device)).items():
                self._found.setdefault(name, []).append(value.to("cpu", torch.float64).numpy())

    def tokens(self, windows: int) -> Tokens:
        """The measurements of all windows, of which there were so many."""
        return Tokens(**{name: np.concatenate(values).reshape(windows, -1) for name, values in self._found.items()})


@torch.no_grad()
def lockstep(
    models: list[StreamedModel],
    batches: Sequence[Tensor],
    watch: Watch,
    kept: ReferenceCache | None = None,
    turn: Callable[[int], None] = lambda at: None,
) -> Iterator[Rows]:
    """For every row of batches [rows, length] what gives the logits of each model, until the next row is asked for.

    One layer of each model is in memory at a time. Batches may differ in length. kept: what the layers of the last
    model give for these batches; they run only where it has not got that, and it is given it then. turn: told which
    batch, by its number, a layer runs on next.
    """
    found = None if kept is None else kept.read()
    running = models if found is None else models[:-1]
    hidden = []
    for model in running:
        with model.outer(embed=True, head=False):  # so that each batch finds the table read
            hidden.append([model.embed(ids) for ids in batches])
    steps = max(len(model.layers) for model in running) + 1
    for number in range(steps - 1):
        for model, states in zip(running, hidden, strict=True):
            if number < len(model.layers):
                _advance(model, number, states, turn)
        watch(number + 1, steps)
    if found is not None:
        models[-1].prepare(batches[0], layers=False)
        hidden.append([state.to(models[-1].device) for state in found])
    elif kept is not None:
        kept.write([models[-1].read_by_head(state) for state in hidden[-1]])
    with ExitStack() as stack:
        heads = [stack.enter_context(model.outer(embed=False, head=True)) for model in models]
        for at, ids in enumerate(batches):
            for row in range(len(ids)):

                def rows(start: int, stop: int, at: int = at, row: int = row) -> list[Tensor]:
                    return [
                        model.logits(head, states[at][row : row + 1, start:stop])[0].to(torch.float32)
                        for model, head, states in zip(models, heads, hidden, strict=True)
                    ]

                yield rows
    watch(steps, steps)


def _advance(model: StreamedModel, number: int, states: list[Tensor], turn: Callable[[int], None]) -> None:
    """Run one layer over all batches, in place."""
    with model.layer(number) as layer:
        for at, state in enumerate(states):
            turn(at)
            states[at] = model.call(number, layer, state)


def _compare(logs: list[Tensor], truth: Tensor) -> dict[str, Tensor]:
    """Measurements [length - 1] from log-probabilities [length - 1, vocabulary] of the subject and any reference.

    The log-probabilities are overwritten. Where a model gives no numbers, neither is what is compared with it: two
    maxima of nothing would agree.
    """
    subject = logs[0]
    nll = -subject.gather(1, truth[:, None])[:, 0]
    if len(logs) == 1:
        return {"nll": nll}
    reference = logs[1]
    found = {"nll": nll, "ref_nll": -reference.gather(1, truth[:, None])[:, 0]}
    same = (reference.max(dim=-1).indices == subject.max(dim=-1).indices).float()  # argmax takes three times as long
    chance = reference.exp()
    kl = reference.sub_(subject).mul_(chance).sum(dim=-1).clamp_min(0)
    tv = chance.sub_(subject.exp_()).abs_().sum(dim=-1) / 2
    return {**found, "kl": kl, "tv": tv, "top1": same.where(tv.isfinite(), tv)}


@dataclass(frozen=True)
class Gate:
    """A condition that fails a run, such as `kl > 0.05`."""

    key: str
    operator: str
    bound: float

    def fails(self, figures: Mapping[str, Any]) -> bool:
        """Whether the condition is true, or the figure is not finite, so that nothing was measured."""
        value = float(figures[self.key])
        return not isfinite(value) or OPERATORS[self.operator](value, self.bound)

    def broken(self, figures: Mapping[str, Any]) -> str:
        """The message for figures that fail."""
        return f"{self.key} is {shown(figures[self.key])}, the gate was {self.key} {self.operator} {self.bound:g}"


def refuse_unmeasured(
    gates: Iterable[Gate], compared: bool, alone: Sequence[str] = ALONE, with_reference: Sequence[str] = COMPARED
) -> None:
    """RecipeError for a gate of an unmeasured figure.

    compared: whether there is a reference. alone: figures that need none; with_reference: those that do.
    """
    gates, known = list(gates), [*alone, *(with_reference if compared else ())]
    for gate in gates:
        if gate.key in with_reference and not compared:
            raise RecipeError(f"--fail-if speaks of {gate.key!r}, which needs the original", "give it as --ref")
    refuse_other_figures(gates, known)


def refuse_other_figures(gates: Iterable[Gate], known: Sequence[str]) -> None:
    """RecipeError for a gate of a figure that is not one of `known`."""
    for gate in gates:
        if gate.key not in known:
            raise RecipeError(
                f"--fail-if speaks of {gate.key!r}, which is not measured", suggest(gate.key, list(known))
            )


def parse_gate(text: str) -> Gate:
    """A gate from its text; RecipeError if it is not `key operator number`."""
    match = re.fullmatch(r"\s*(\w+)\s*(>=|<=|>|<)\s*([0-9.eE+-]+)\s*", text)
    try:
        if match is None or not isfinite(float(match[3])):
            raise ValueError
        return Gate(match[1], match[2], float(match[3]))
    except ValueError:
        raise RecipeError(f"--fail-if {text!r} is not a condition", "write for example --fail-if 'kl > 0.05'") from None
