"""The vocabulary of a SentencePiece-like tokenizer that is stored as BPE with byte_fallback."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from llmcompress.errors import CheckpointError
from llmcompress.formats.gguf.vocabulary import (
    BYTE,
    BYTES,
    NORMAL,
    SPACE,
    UNKNOWN,
    Vocabulary,
    added_type,
    steps_of,
    stripping,
)


def sentencepiece_like(
    state: Mapping[str, Any],
    ids: Mapping[str, int],
    texts: list[str],
    added: Mapping[int, Mapping[str, Any]],
    file: Path,
) -> Vocabulary:
    """Vocabulary from parts of tokenizer.json; texts and added tokens by id. CheckpointError as `read_vocabulary`."""
    missing = [byte for byte in BYTES if byte not in ids]
    if missing:
        raise CheckpointError(f"{file} lacks the token {missing[0]}, without which llama.cpp stops on unknown letters")
    merges = state["model"]["merges"]
    prefix, notes = _spaces(state, texts, file)
    texts = list(texts)
    types = [NORMAL] * len(texts)
    for byte in BYTES:
        types[ids[byte]] = BYTE
    merged = {left + right for left, right in merges}
    for number, token in added.items():
        text = token["content"]
        if SPACE in text and text in merged and not token["special"] and not token["normalized"]:
            continue  # looked for before spaces become ▁, so it comes from merges alone
        types[number] = added_type(token)
        if token["normalized"]:
            texts[number] = text.replace(SPACE, " ")
    unknown = ids.get(state["model"]["unk_token"])
    if unknown is not None:
        types[unknown] = UNKNOWN
    scores = _scores(merges, ids, types)
    return Vocabulary(
        model="llama",
        pre="default",
        texts=texts,
        types=types,
        scores=scores,
        merges=None,
        add_space_prefix=prefix,
        notes=notes + stripping(added) + _inexact(merges, ids, types),
    )


def _spaces(state: Mapping[str, Any], texts: Sequence[str], file: Path) -> tuple[bool, list[str]]:
    """Whether a text gets a space in front, and what llama.cpp does otherwise around it."""
    prefix, notes = False, []
    steps = steps_of(state["normalizer"], "normalizers") + steps_of(state["pre_tokenizer"], "pretokenizers")
    for step in steps:
        kind = step["type"]
        if kind == "Prepend" and step["prepend"] == SPACE:
            prefix = True
        elif kind == "Metaspace" and step["replacement"] == SPACE:
            if step["prepend_scheme"] != "never":
                prefix = True
                notes.append("llama.cpp puts a space before every text, this tokenizer only where there is none")
            if step["prepend_scheme"] == "first":
                notes.append("llama.cpp puts a space after every special token, this tokenizer does not")
            if step["split"] and any(SPACE in text.lstrip(SPACE) or text.startswith(2 * SPACE) for text in texts):
                raise CheckpointError(
                    f"{file} cuts text at spaces, llama.cpp does not, and there are tokens across spaces"
                )
        elif not (_replaces_spaces(step) or (kind == "Split" and step["pattern"] == {"String": " "})):
            raise CheckpointError(f"{file} changes or cuts text in a way that llama.cpp does not know ({kind})")
    if not any(step["type"] == "Metaspace" or _replaces_spaces(step) for step in steps):
        raise CheckpointError(f"{file} does not write spaces as {SPACE}, as llama.cpp does")
    return prefix, notes


def _replaces_spaces(step: Mapping[str, Any]) -> bool:
    return bool(step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == SPACE)


def _scores(merges: Sequence[Sequence[str]], ids: Mapping[str, int], types: Sequence[int]) -> list[float]:
    """llama.cpp joins the pair whose result scores highest: minus the order in which merges make the pieces.

    Pieces that no merge makes come after all others; tokens that are not pieces score 0.
    """
    order: dict[int, int] = {}
    for left, right in merges:
        order.setdefault(ids[left + right], len(order))
    for number, kind in enumerate(types):
        if kind == NORMAL:
            order.setdefault(number, len(order))
    return [float(-order.get(number, 0)) if kind == NORMAL else 0.0 for number, kind in enumerate(types)]


def _inexact(merges: Sequence[Sequence[str]], ids: Mapping[str, int], types: Sequence[int]) -> list[str]:
    """llama.cpp joins any two pieces that make a third: a note where the merges forbid some of that."""
    results = [ids[left + right] for left, right in merges]
    made = set(results)
    pieces = [text for text, number in ids.items() if types[number] == NORMAL or number in made]
    ways = sum(text[:at] in ids and text[at:] in ids for text in pieces for at in range(1, len(text)))
    runs = 1 + sum(a != b for a, b in pairwise(results))
    if ways == len(merges) and runs == len(made):
        return []
    return ["llama.cpp orders merges by the piece they make, so it may cut rare words otherwise than this tokenizer"]
