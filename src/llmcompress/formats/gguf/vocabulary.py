"""Tokens by id with their types: what the kinds of tokenizers have in common."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcompress.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types of GGUF (`tokenizer.ggml.token_type`)."""

SPACE = "▁"
"""What stands for a space in the pieces of SentencePiece."""

BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""The pieces of single bytes."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id with all that belongs to them; see `GgufTokenizer`. An empty text is an id without a token."""

    model: str
    pre: str
    texts: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str] | None
    add_space_prefix: bool
    notes: list[str]


def refuse_excess(ids: Iterable[int], file: Path, rows: int) -> None:
    """CheckpointError if an id lies beyond the `rows` of the embedding."""
    highest = max(ids, default=0)
    if highest >= rows:
        raise CheckpointError(
            f"{file} has tokens up to id {highest}, but the embedding has {rows} rows",
            "the tokenizer is that of another model; copy the original tokenizer files",
        )


def refuse_pre(pre: str | None, file: Path) -> None:
    """CheckpointError if a pre-tokenizer is named for a kind of tokenizer that has none in llama.cpp."""
    if pre is not None:
        raise CheckpointError(
            f"{file} is a SentencePiece-like tokenizer, which has no pre-tokenizer to name", f"leave out --pre {pre}"
        )


def texts_by_id(ids: Mapping[str, int], added: Mapping[int, Mapping[str, Any]], file: Path) -> list[str]:
    """Texts by id of the model's own and the added tokens; CheckpointError where two have one id."""
    texts = [""] * (1 + max([*ids.values(), *added], default=-1))
    for text, number in (*ids.items(), *((token["content"], number) for number, token in added.items())):
        if texts[number] not in ("", text):
            raise CheckpointError(f"{file} gives id {number} to both {texts[number]!r} and {text!r}")
        texts[number] = text
    return texts


def added_type(token: Mapping[str, Any]) -> int:
    """Type of an added token. Text such as <|im_start|> is control even where it is not marked as special."""
    text = token["content"]
    marked = (text.startswith("<|") and text.endswith("|>")) or (text.startswith("<｜") and text.endswith("｜>"))
    return CONTROL if token["special"] or marked else USER_DEFINED


def stripping(added: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """A note on added tokens that take the spaces beside them, or stand only between words."""
    rules = ("lstrip", "rstrip", "single_word")
    strict = [token["content"] for token in added.values() if any(token[rule] for rule in rules)]
    if not strict:
        return []
    more = f" and {len(strict) - 1} more" if len(strict) > 1 else ""
    return [f"llama.cpp does not look at the spaces beside {strict[0]}{more}, as this tokenizer does"]


def steps_of(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, which may be none, one, or a sequence of steps or sequences."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for inner in part[key] for step in steps_of(inner, key)]
