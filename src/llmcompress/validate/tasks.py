"""How many items of tasks a compressed model answers as well as its original.

An item is answered by the choice whose log-likelihood after the prompt is largest, or, where there is one choice, by
whether the model would write it greedily, or by a regular expression on what it writes. Both models answer the same
items, so differences are paired. 95% intervals are Wilson's for shares (1927), those of Agresti and Min for differences
of shares (2005, section 3: half an item added to each of the four outcomes), which say something where few items differ
or none does, and by bootstrap over items for log-likelihoods. McNemar's exact test (1947) judges the items that one
model alone gets right.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import comb
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llmcompress.errors import CalibrationError
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.significant import significant
from llmcompress.validate.evaluate import Watch, lockstep
from llmcompress.validate.omission import Contexts, of_items
from llmcompress.validate.request import Request
from llmcompress.validate.session import check_models, omission_said, open_models, writer
from llmcompress.validate.task_files import Task
from llmcompress.validate.task_items import Item
from llmcompress.validate.task_prompts import Asked, asked_of, refuse_longer, refuse_shorter, room_of
from llmcompress.validate.token_statistics import Array

ALONE = ("items", "acc", "acc_norm", "loglikelihood")
COMPARED = (
    *("ref_acc", "ref_acc_norm", "ref_loglikelihood", "acc_drop", "acc_norm_drop", "loglikelihood_drop"),
    *("acc_p", "same_answer"),
)
_HELD = 1 << 30  # bytes of hidden states that are in memory at once
_STEP = 16  # lengths are filled up to multiples of this, so that few of them differ
_RESAMPLES = 1000
_Z = 1.959964  # of a 95% interval


class ChoiceScores(NamedTuple):
    """Of a model's continuations: log-likelihood [pairs] in nats, and whether each token is the likeliest [pairs].

    Where an item says how what is written is judged, greedy is whether that is right.
    """

    loglikelihood: Array
    greedy: Array


class Answers(NamedTuple):
    """Of a model, by item: whether it answers right, the same by characters, log-likelihood of the right answer.

    normed is None where some item has no `acc_norm`. chosen: the choice it takes, 0 or 1 where there is only one.
    """

    right: Array
    normed: Array | None
    loglikelihood: Array
    chosen: Array


def task_figures(request: Request, tasks: Sequence[Task], watch: Watch, chat: bool = False) -> dict[str, Any]:
    """Figures of all items, and under `tasks` those of each task by its name. chat: through the chat template.

    With an eviction, which `omitted` names, all tokens of a prompt but the last are the context: whatever is scored or
    written is predicted behind it. CalibrationError for an item that is longer than the model's context, that an
    eviction leaves too little of, or whose continuation has no tokens.
    """
    check_models(request)
    items = [item for task in tasks for item in task.items]
    asked, prompts = asked_of(request, items, chat)
    subject, reference, _ = open_models(request)
    refuse_longer(subject, asked, prompts, items)
    contexts, layers = Contexts(), None
    if (eviction := of_items(request.omission, contexts)) is not None:
        refuse_shorter(eviction, asked, prompts, items)
        layers = eviction.install(subject)
    models = [model for model in (subject, reference) if model is not None]
    more, steps = len(prompts) * len(models), 0

    def scoring(done: int, of: int) -> None:
        nonlocal steps
        steps = of
        watch(done, of + more)

    scores = score(models, [one for of_item in asked for one in of_item], request.batch, scoring, contexts)
    omitted = {} if layers is None else {"omitted": omission_said(request, layers, len(subject.layers))}
    _write(request, items, prompts, scores, lambda done: watch(steps + done, steps + more))
    found, start, pairs = {}, 0, 0
    for task in tasks:
        stop = start + len(task.items)
        many = sum(map(len, asked[start:stop]))
        part = [ChoiceScores(*(values[pairs : pairs + many] for values in one)) for one in scores]
        found[task.name] = figures(task.items, part)
        start, pairs = stop, pairs + many
    return {**figures(items, scores), **omitted, "tasks": found}


def _write(
    request: Request,
    items: Sequence[Item],
    prompts: Mapping[int, Sequence[int]],
    scores: Sequence[ChoiceScores],
    watch: Callable[[int], None],
) -> None:
    """Have each model write after each prompt, and put whether that is right into its scores.

    watch: told how many texts are written. CalibrationError for a pattern that takes too long.
    """
    places = np.cumsum([0, *(len(item.pairs) for item in items)])
    paths = [path for path in (request.model, request.ref) if path is not None]
    for turn, (path, of_model) in enumerate(zip(paths, scores, strict=True)):
        write = writer(request, path, original=turn > 0) if prompts else None
        for done, (number, ids) in enumerate(prompts.items(), 1):
            judged = items[number].written
            assert write is not None
            assert judged is not None
            try:
                right = judged.right(write(ids, judged.most, judged.stops))
            except TimeoutError:
                raise CalibrationError(f"{items[number].where}: its pattern takes too long", "write another") from None
            of_model.greedy[places[number]] = float(right)
            watch(turn * len(prompts) + done)


def score(
    models: list[StreamedModel],
    asked: Sequence[Asked],
    batch: int,
    watch: Watch,
    contexts: Contexts | None = None,
) -> list[ChoiceScores]:
    """The scores of each model. Inputs that continuations share run once; shorter ones are filled up at their end.

    Nothing that follows a token changes it, so what fills up changes nothing. contexts: is told those of what runs.
    """
    readers: dict[Asked, list[int]] = {}
    for number, one in enumerate(asked):
        readers.setdefault(Asked(one.ids[:-1], one.start), []).append(number)
    inputs = sorted(readers, key=lambda one: len(one.ids))
    found = [ChoiceScores(np.full(len(asked), np.nan), np.full(len(asked), np.nan)) for _ in models]
    room = min((most for model in models if (most := room_of(model)) is not None), default=None)
    portions = list(_portions(inputs, models, batch))
    for done, portion in enumerate(portions):
        parts = [portion[start : start + batch] for start in range(0, len(portion), batch)]
        batches = [_filled([one.ids for one in part], room) for part in parts]

        def turn(at: int, parts: list[list[Asked]] = parts) -> None:
            if contexts is not None:
                contexts.rows = [one.start - 1 for one in parts[at]]

        run = lockstep(models, batches, _shifted(watch, done, len(portions)), turn=turn)
        for read, rows in zip(portion, run, strict=True):
            for scores, logits in zip(found, rows(read.start - 1, len(read.ids)), strict=True):
                for number in readers[read]:
                    scores.loglikelihood[number], scores.greedy[number] = _continuation(logits, asked[number])
    return found


def _portions(inputs: Sequence[Asked], models: Sequence[StreamedModel], batch: int) -> Iterator[list[Asked]]:
    """Inputs in portions, of whole batches, whose hidden states fit into memory together."""
    each = sum(model.embedding_width * model.streams * model.dtype.itemsize for model in models)
    portion: list[Asked] = []
    held = 0
    for one in inputs:
        if portion and len(portion) % batch == 0 and held > _HELD:
            yield portion
            portion, held = [], 0
        portion.append(one)
        held += each * len(one.ids)
    if portion:
        yield portion


def _filled(rows: Sequence[tuple[int, ...]], room: int | None) -> Tensor:
    """Rows of token ids as one tensor int64 [rows, length], filled up with zeros. room: the most tokens models read."""
    longest = max(map(len, rows))
    length = -(-longest // _STEP) * _STEP
    if room is not None and length > room:
        length = longest
    return torch.tensor([[*ids, *[0] * (length - len(ids))] for ids in rows])


def _shifted(watch: Watch, done: int, portions: int) -> Watch:
    """`watch` for one of several portions."""
    return lambda step, steps: watch(done * steps + step, portions * steps)


def _continuation(logits: Tensor, one: Asked) -> tuple[float, float]:
    """Log-likelihood of a continuation, and whether it is what the model would write greedily.

    logits: [tokens, vocabulary] from the last token of the prompt on.
    """
    wanted = torch.tensor(one.ids[one.start :], device=logits.device)
    values = logits.log_softmax(dim=-1)
    total = float(values.gather(1, wanted[:, None]).sum())
    return total, float(bool((values.argmax(dim=-1) == wanted).all())) if np.isfinite(total) else np.nan


def answers(items: Sequence[Item], scores: ChoiceScores) -> Answers:
    """The answers of a model; nan where a log-likelihood is not finite."""
    right, normed, likely, chosen = (np.empty(len(items)) for _ in range(4))
    start = 0
    for number, item in enumerate(items):
        stop = start + len(item.pairs)
        values = scores.loglikelihood[start:stop]
        likely[number] = values[item.answer]
        if not np.isfinite(values).all():
            right[number] = normed[number] = chosen[number] = np.nan
        elif len(item.pairs) == 1:
            right[number] = chosen[number] = scores.greedy[start]
        else:
            chosen[number] = values.argmax()
            right[number] = chosen[number] == item.answer
            if item.lengths is not None:
                normed[number] = (values / np.array(item.lengths)).argmax() == item.answer
        start = stop
    defined = all(item.lengths is not None for item in items)
    return Answers(right, normed if defined else None, likely, chosen)


def figures(items: Sequence[Item], scores: Sequence[ChoiceScores]) -> dict[str, Any]:
    """Figures of some items by name, those of ALONE and, with scores of a reference too, of COMPARED.

    `_ci`: 95% intervals; `_drop`: the reference's less the model's; `acc_p`: the chance of a difference as large
    between equal models.
    """
    subject, *others = (answers(items, one) for one in scores)
    result: dict[str, Any] = {"items": len(items)}

    def add(name: str, value: float, interval: tuple[float, float]) -> None:
        result[name] = significant(value)
        result[f"{name}_ci"] = [significant(bound) for bound in interval]

    def add_model(prefix: str, of_model: Answers) -> None:
        add(f"{prefix}acc", of_model.right.mean(), share_interval(of_model.right))
        if of_model.normed is not None:
            add(f"{prefix}acc_norm", of_model.normed.mean(), share_interval(of_model.normed))
        add(f"{prefix}loglikelihood", of_model.loglikelihood.mean(), mean_interval(of_model.loglikelihood))

    add_model("", subject)
    for reference in others:
        add_model("ref_", reference)
        add("acc_drop", (reference.right - subject.right).mean(), drop_interval(reference.right, subject.right))
        if subject.normed is not None and reference.normed is not None:
            drop = (reference.normed - subject.normed).mean()
            add("acc_norm_drop", drop, drop_interval(reference.normed, subject.normed))
        likely = reference.loglikelihood - subject.loglikelihood
        add("loglikelihood_drop", likely.mean(), mean_interval(likely))
        result["acc_p"] = mcnemar(reference.right, subject.right)
        missing = np.isnan(reference.chosen + subject.chosen)
        same = np.where(missing, np.nan, reference.chosen == subject.chosen)
        add("same_answer", same.mean(), share_interval(same))
    return result


def share_interval(values: Array) -> tuple[float, float]:
    """Wilson's interval of the share of ones among zeros and ones."""
    count, share = len(values), values.mean()
    middle = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * np.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    return float(max(middle - half, 0.0)), float(min(middle + half, 1.0))


def drop_interval(before: Array, after: Array) -> tuple[float, float]:
    """The interval of Agresti and Min of how much the share of ones falls, of the same items."""
    count, lost, won = len(before) + 2, (before > after).sum() + 0.5, (before < after).sum() + 0.5
    drop = (lost - won) / count if np.isfinite(before + after).all() else np.nan
    half = _Z * np.sqrt(lost + won - (lost - won) ** 2 / count) / count
    return float(drop - half), float(drop + half)


def mean_interval(values: Array) -> tuple[float, float]:
    """Percentile bootstrap of a mean over items, with the same draws for everything of one number of items."""
    draw = np.random.default_rng(0).integers
    means = [values[draw(0, len(values), size=len(values))].mean() for _ in range(_RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def mcnemar(before: Array, after: Array) -> float:
    """McNemar's exact test, two-sided, on right (1) and wrong (0) answers to the same items; nan if some are nan."""
    if np.isnan(before + after).any():
        return float("nan")
    lost, won = int(((before == 1) & (after == 0)).sum()), int(((before == 0) & (after == 1)).sum())
    tail = sum(comb(lost + won, count) for count in range(min(lost, won) + 1))
    return significant(min(1.0, 2 * tail / 2 ** (lost + won)))
