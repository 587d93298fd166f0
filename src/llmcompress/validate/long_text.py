"""`eval --long`: what becomes of a compressed model, beside its original, in text as long as it reads.

Three things that a mean over short windows does not show: whether the models part further the more text stands before
a token, whether a fact is found again in long text, and whether a text that is written goes round in circles.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcompress.calib.base import opening
from llmcompress.engine.source.text_tokenizer import load_tokenizer
from llmcompress.errors import CalibrationError, RecipeError
from llmcompress.significant import significant
from llmcompress.validate.evaluate import Watch, cut_windows, measure
from llmcompress.validate.long_evaluation import long_evaluation
from llmcompress.validate.needles import DEPTHS, Haystack, Needle, haystack, needle_figures, plant
from llmcompress.validate.repetition import ALONE as WRITTEN
from llmcompress.validate.repetition import COMPARED as WRITTEN_COMPARED
from llmcompress.validate.repetition import repetition_figures
from llmcompress.validate.request import Request
from llmcompress.validate.session import check_models, greedy_writer, open_models, packed_ids
from llmcompress.validate.task_prompts import room_of
from llmcompress.validate.tasks import ChoiceScores, mean_interval, score
from llmcompress.validate.token_statistics import ALONE as TOKENS
from llmcompress.validate.token_statistics import COMPARED as TOKENS_COMPARED
from llmcompress.validate.token_statistics import Array, Tokens, token_figures

ALONE = (*TOKENS, "needle_items", "needle_acc", "needle_exact", "needle_loglikelihood", *WRITTEN)
COMPARED = (
    *(*TOKENS_COMPARED, "kl_growth"),
    *(f"ref_needle_{name}" for name in ("acc", "exact", "loglikelihood")),
    *(f"needle_{name}_drop" for name in ("acc", "exact", "loglikelihood")),
    *("needle_acc_p", "needle_exact_p", "needle_same_answer", *WRITTEN_COMPARED),
)
LONGEST = 4096  # tokens of a window, unless another length is asked for
_WINDOWS = 16  # at most, unless others are asked for
_FIRST = 128  # tokens of the first band
_MOST_NEEDLES = 100  # texts of each length with facts, all of which are in memory
_PROMPTS, _PROMPT, _WRITTEN = 16, 32, 200  # texts that are written, tokens of the text before each, and after


def long_document(request: Request, length: int | None, needles: int, watch: Watch) -> dict[str, Any]:
    """The document of what becomes of request.model, and of request.ref if there is one, in long text.

    length: tokens of a window; None for the context, at most 4096 and no more than the text has. needles: texts of each
    length with planted facts, 1 to 100. CalibrationError for a length beyond the context or the text, or too short for
    the facts.
    """
    if not 1 <= needles <= _MOST_NEEDLES:
        raise RecipeError(f"--long plants 1 to {_MOST_NEEDLES} --items, not {needles}")
    check_models(request)
    tokenizer = load_tokenizer(request.ref or request.model, request.trust_remote_code)
    ids = packed_ids(request, tokenizer)
    subject, reference, cache = open_models(request)
    models = [model for model in (subject, reference) if model is not None]
    context = min((room for model in models if (room := room_of(model)) is not None), default=None)
    length = _length(request, length, context, len(ids))
    windows = cut_windows(ids, length, request.windows or min(_WINDOWS, len(ids) // length), f"text {request.text}")
    text = haystack(tokenizer, ids)
    prompts = _prompts(text, opening(tokenizer))
    if context is not None and prompts.shape[1] + _WRITTEN > context:
        raise CalibrationError(
            f"--long has {_WRITTEN} tokens written after {prompts.shape[1]}, the model reads {context}",
            "evaluate without --long",
        )
    planted = plant(tokenizer, text, length, needles)
    paths = [path for path in (request.model, request.ref) if path is not None]
    steps = max(len(model.layers) for model in models) + 1
    after, before = steps + len(paths), 0

    def scoring(done: int, of: int) -> None:
        nonlocal before
        before = of
        watch(done, of + after)

    scores = score(models, [one for needle in planted for one in needle.asked], request.batch, scoring)
    tokens = measure(subject, reference, windows, request.batch, lambda done, of: watch(before + done, before + after))
    written = []
    for turn, path in enumerate(paths):
        written.append(greedy_writer(request, path, turn > 0, tokenizer)(prompts, _WRITTEN))
        watch(before + steps + turn + 1, before + after)
    found = {
        "figures": {**token_figures(tokens), **_growth(tokens, length), "kv_cache": cache and str(cache)},
        "bands": [
            {"first": first, "last": last, **token_figures(_between(tokens, first, last))}
            for first, last in bands(length)
        ],
        "needles": _by_place(planted, scores),
        "repetition": {"most": _WRITTEN, **repetition_figures(written)},
    }
    return long_evaluation(request, windows, context, found)


def flat_figures(document: Mapping[str, Any]) -> dict[str, Any]:
    """All figures over a whole document by the names that conditions use, with intervals."""
    needles = document["needles"]["figures"]
    return {
        **document["figures"],
        **{_needle_name(name): value for name, value in needles.items()},
        **{name: value for name, value in document["repetition"].items() if name != "most"},
    }


def bands(length: int) -> Iterator[tuple[int, int]]:
    """The least and the most tokens before those of each band of a window, whose first token is not scored."""
    start, stop = 1, min(_FIRST, length)
    while start < length:
        yield start, stop - 1
        start, stop = stop, min(2 * stop, length)


def _length(request: Request, asked: int | None, context: int | None, tokens: int) -> int:
    """The tokens of a window."""
    if asked is None:
        return min(LONGEST, tokens, LONGEST if context is None else context)
    if context is not None and asked > context:
        raise CalibrationError(
            f"windows of {asked} tokens are longer than the model's {context} positions", f"use --length {context}"
        )
    if asked > tokens:
        raise CalibrationError(
            f"text {request.text} has {tokens} tokens, a window {asked}", "give more text, or a shorter --length"
        )
    return asked


def _prompts(text: Haystack, first: int | None) -> Tensor:
    """Beginnings of sentences in all parts of a text, as token ids [prompts, tokens]."""
    begin = () if first is None else (first,)
    found = [(*begin, *text.part(number / _PROMPTS, _PROMPT).ids) for number in range(_PROMPTS)]
    return torch.tensor(list(dict.fromkeys(found)), dtype=torch.int64)  # a short text begins with few


def _between(tokens: Tokens, first: int, last: int) -> Tokens:
    """The measurements of tokens that have from `first` to `last` others before them."""
    parts: dict[str, Any] = {
        name: None if values is None else values[:, first - 1 : last] for name, values in vars(tokens).items()
    }
    return Tokens(**parts)


def _growth(tokens: Tokens, length: int) -> dict[str, Any]:
    """How much larger the mean KL divergence is in the far half of positions than in the near half."""
    if tokens.kl is None:
        return {}
    each: Array = tokens.kl[:, length // 2 - 1 :].mean(axis=1) - tokens.kl[:, : length // 2 - 1].mean(axis=1)
    found: dict[str, Any] = {"kl_growth": significant(each.mean())}
    if len(each) > 1:
        found["kl_growth_ci"] = [significant(bound) for bound in mean_interval(each)]
    return found


def _by_place(planted: Sequence[Needle], scores: Sequence[ChoiceScores]) -> dict[str, Any]:
    """Figures of all needles, of those at each depth and of those in text of each length."""
    choices = len(planted[0].asked)

    def of(wanted: Sequence[bool]) -> dict[str, Any]:
        pairs = np.repeat(wanted, choices)
        chosen = [needle for needle, one in zip(planted, wanted, strict=True) if one]
        return needle_figures(chosen, [ChoiceScores(*(values[pairs] for values in one)) for one in scores])

    lengths = dict.fromkeys(needle.length for needle in planted)
    return {
        "figures": of([True] * len(planted)),
        "by_depth": {f"{depth:.0%}": of([needle.depth == depth for needle in planted]) for depth in DEPTHS},
        "by_length": {str(length): of([needle.length == length for needle in planted]) for length in lengths},
    }


def _needle_name(name: str) -> str:
    """What a figure of needles is called among others."""
    return f"ref_needle_{name.removeprefix('ref_')}" if name.startswith("ref_") else f"needle_{name}"
