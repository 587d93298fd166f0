"""Needles in text: facts planted between the sentences of a long text, of which a model is asked for one.

A fact says the secret word of a person. The text ends with the beginning of one of its facts, and a model that finds
the fact goes on with its word: also one that was never taught to answer questions. The word is judged against those of
the other facts, which only the person tells apart, and against words that no fact has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from llmcompress.calib.base import opening
from llmcompress.calib.documents import Document, token_ids
from llmcompress.errors import CalibrationError
from llmcompress.validate.task_items import Item
from llmcompress.validate.task_prompts import Asked
from llmcompress.validate.tasks import ChoiceScores, figures

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the facts, as shares of the text
_CHOICES = 10  # words that a fact's is judged against, itself among them
_PEOPLE = (
    *("Marlow", "Tessa", "Quentin", "Odette", "Barnaby", "Imogen", "Florian", "Greta", "Lucian", "Matilda"),
    *("Nestor", "Philippa", "Rupert", "Sabine", "Tobias", "Ursula", "Vincent", "Winona", "Xavier", "Yvonne"),
)
_WORDS = (
    *("copper", "silver", "garden", "river", "winter", "summer", "yellow", "purple", "orange", "window", "bridge"),
    *("castle", "forest", "island", "ocean", "desert", "thunder", "candle", "mirror", "hammer", "ladder", "button"),
    *("basket", "blanket", "pencil", "whistle", "lantern", "anchor", "feather", "marble", "velvet", "ginger"),
)
_SEED = 0


@dataclass(frozen=True)
class Needle:
    """A fact that is asked for. depth: where it stands, as a share of the text; length: tokens of all that is read.

    asked: the text with each of the words that are judged; answer: which of these is right.
    """

    depth: float
    length: int
    asked: Sequence[Asked]
    answer: int


@dataclass(frozen=True)
class Haystack:
    """Text to plant facts in. ids: its tokens; begins: which of them, from 0, begin a sentence, in order."""

    ids: Sequence[int]
    begins: Sequence[int]

    def part(self, start: float, tokens: int) -> "Haystack":
        """So many tokens from the first sentence behind a share of the text on; its beginning follows on its end."""
        first = next((at for at in self.begins if at >= start * len(self.ids)), 0)
        turned = [*self.ids[first:], *self.ids[:first]]
        begins = sorted((at - first) % len(self.ids) for at in self.begins)
        return Haystack(turned[:tokens], [at for at in begins if at < tokens])


def haystack(tokenizer: Any, ids: Sequence[int]) -> Haystack:
    """Packed text without the tokens that begin documents."""
    first = opening(tokenizer)
    kept = [token for token in ids if token != first]
    closing = {token for token in set(kept) if tokenizer.decode([token]).rstrip(" ").endswith((".", "!", "?", "\n"))}
    return Haystack(kept, [0, *(at for at in range(1, len(kept)) if kept[at - 1] in closing)])


def plant(tokenizer: Any, text: Haystack, length: int, texts: int) -> list[Needle]:
    """Needles in text of `length` tokens, of half and of a quarter of these where facts leave half of it for text.

    texts: how many texts of each length, in each of which every fact is asked for. CalibrationError for a length that
    facts take more than half of.
    """
    phrases = _phrases(tokenizer)
    words = _words(phrases)
    first = opening(tokenizer)
    begin = [] if first is None else [first]
    draw = np.random.default_rng(_SEED)
    longest = max(len(phrases[_fact(*pair)]) for pair in product(_PEOPLE, words))
    room = longest * (len(DEPTHS) + 1) + len(begin)
    if length < 2 * room:
        raise CalibrationError(
            f"the facts that --long plants have {room} tokens, too many for text of {length}",
            f"use --length {2 * room} or more, and as much text",
        )
    found = []
    for size in (length, length // 2, length // 4):
        for number in range(texts if size >= 2 * room else 0):
            people = [_PEOPLE[at] for at in draw.permutation(len(_PEOPLE))[: len(DEPTHS)]]
            choices = [words[at] for at in draw.permutation(len(words))[:_CHOICES]]
            told = draw.permutation(_CHOICES)[: len(DEPTHS)].tolist()
            facts = [phrases[_fact(person, choices[at])] for person, at in zip(people, told, strict=True)]
            asked = [[phrases[_question(person) + f" {word}"] for word in choices] for person in people]
            rest = size - len(begin) - sum(map(len, facts)) - max(len(one) for row in asked for one in row)
            read = [*begin, *_planted(text.part(number / texts, rest), facts)]
            for depth, person, answer, row in zip(DEPTHS, people, told, asked, strict=True):
                start = len(read) + len(phrases[_question(person)])
                found.append(Needle(depth, size, [Asked((*read, *one), start) for one in row], answer))
    return found


def needle_figures(needles: Sequence[Needle], scores: Sequence[ChoiceScores]) -> dict[str, Any]:
    """Figures of some needles: those of tasks, and `exact`, whether the right word is what a model writes greedily.

    scores: of each model, of the words of one needle after those of another.
    """
    items = [_item(len(needle.asked), needle.answer) for needle in needles]
    starts = np.cumsum([0, *(len(needle.asked) for needle in needles)])[:-1]
    right = starts + [needle.answer for needle in needles]
    written = [ChoiceScores(one.loglikelihood[right], one.greedy[right]) for one in scores]
    exact = figures([_item(1, 0)] * len(needles), written)
    named = {name.replace("acc", "exact"): value for name, value in exact.items() if "acc" in name}
    return {**figures(items, scores), **named}


def _item(choices: int, answer: int) -> Item:
    return Item("", [("", "")] * choices, answer, None)


def _fact(person: str, word: str) -> str:
    return f"{_question(person)} {word}.\n"


def _question(person: str) -> str:
    return f"\nThe secret word of {person} is"


def _phrases(tokenizer: Any) -> dict[str, list[int]]:
    """The token ids of every fact and question, and of every question with a word."""
    pairs = list(product(_PEOPLE, _WORDS))
    texts = [*map(_question, _PEOPLE), *(f"{_question(person)} {word}" for person, word in pairs)]
    texts += [_fact(*pair) for pair in pairs]
    rows = (Document("a fact that --long plants", text, special_tokens=False) for text in texts)
    return {text: list(ids) for text, ids in zip(texts, token_ids(tokenizer, rows, "--long"), strict=True)}


def _words(phrases: Mapping[str, Sequence[int]]) -> list[str]:
    """The words of the smallest number of tokens that enough have: none is likelier for being short.

    Words of one token cost no run of their own.
    """
    sizes: dict[int, list[str]] = {}
    for word in _WORDS:
        each = {len(phrases[f"{_question(person)} {word}"]) - len(phrases[_question(person)]) for person in _PEOPLE}
        if len(each) == 1:
            sizes.setdefault(each.pop(), []).append(word)
    fitting = [size for size, words in sizes.items() if size > 0 and len(words) >= _CHOICES]
    if not fitting:
        raise CalibrationError(
            f"the tokenizer has no {_CHOICES} of the words that --long plants in equally many tokens",
            "evaluate on text and tasks, without --long",
        )
    return sizes[min(fitting)]


def _planted(text: Haystack, facts: Sequence[Sequence[int]]) -> list[int]:
    """The tokens of a text with a fact at each of the depths, before the sentence there if that began near."""
    read: list[int] = []
    before = 0
    for depth, fact in zip(DEPTHS, facts, strict=True):
        wanted = round(depth * len(text.ids))
        near = max(before, wanted - len(text.ids) // 10)
        at = max((begin for begin in (*text.begins, len(text.ids)) if near <= begin <= wanted), default=wanted)
        read += [*text.ids[before:at], *fact]
        before = at
    return read + list(text.ids[before:])
