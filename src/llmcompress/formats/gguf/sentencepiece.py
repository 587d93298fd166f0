"""tokenizer.model, the file of the SentencePiece library: a protocol buffer, of which few fields matter.

Source: sentencepiece_model.proto of SentencePiece (ModelProto, TrainerSpec, NormalizerSpec).
"""

import operator
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from llmcompress.errors import CheckpointError
from llmcompress.formats.gguf.vocabulary import (
    BYTES,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    refuse_excess,
)
from llmcompress.store.headers import read_json

MODEL = "tokenizer.model"
BPE = 2  # TrainerSpec.model_type
_LARGEST = 100_000_000


@dataclass(frozen=True)
class SentencePieceModel:
    """Pieces by id with their scores and types (numbered as in GGUF), and what else changes ids.

    special: ids of bos, eos, unk and pad, each where there is one. model_type: 1 unigram, 2 BPE, 3 words, 4 characters.
    add_space_prefix: a text gets a space in front. normalises: text is changed by rules before it is cut.
    """

    pieces: list[str]
    scores: list[float]
    types: list[int]
    special: dict[str, int]
    model_type: int
    add_space_prefix: bool
    normalises: bool


def read_model(file: Path) -> SentencePieceModel:
    """The model in `file`; CheckpointError if it is not one."""
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST:
            raise CheckpointError(f"{file} is not a file of at most {_LARGEST:,} bytes")
        return _model(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, struct.error, IndexError, AttributeError, TypeError):
        raise CheckpointError(f"{file} is not a SentencePiece model", "fetch the file again") from None


def _model(raw: bytes) -> SentencePieceModel:
    pieces, scores, types = [], [], []
    trainer: dict[int, int | bytes] = {}
    normaliser: dict[int, int | bytes] = {}
    for field, value in _fields(raw):
        if field == 1:
            piece = dict(_fields(_bytes(value)))
            pieces.append(_bytes(piece.get(1, b"")).decode())
            scores.append(struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0])
            types.append(_number(piece.get(3, 1)))
        elif field == 2:
            trainer = dict(_fields(_bytes(value)))
        elif field == 3:
            normaliser = dict(_fields(_bytes(value)))
    if not pieces or not set(types) <= set(range(1, 7)) or not all(map(isfinite, scores)):
        raise ValueError("no pieces")
    # defaults of TrainerSpec; -1, a token that does not exist, is stored as 2**64 - 1
    numbers = {
        "unk": trainer.get(40, 0),
        "bos": trainer.get(41, 1),
        "eos": trainer.get(42, 2),
        "pad": trainer.get(43, -1),
    }
    return SentencePieceModel(
        pieces=pieces,
        scores=scores,
        types=types,
        special={name: _number(value) for name, value in numbers.items() if 0 <= _number(value) < len(pieces)},
        model_type=_number(trainer.get(3, 1)),
        add_space_prefix=_number(normaliser.get(3, 1)) != 0,
        normalises=bool(normaliser.get(2)),
    )


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a message: a number where it is a varint, else the bytes it takes."""
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        kind = key & 7
        if kind == 0:
            number, at = _varint(raw, at)
            yield key >> 3, number
            continue
        if kind == 2:
            length, at = _varint(raw, at)
        else:
            length = {1: 8, 5: 4}.get(kind, len(raw) + 1)
        if at + length > len(raw):
            raise ValueError("truncated")
        yield key >> 3, raw[at : at + length]
        at += length


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        byte = raw[at]
        number |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return number, at
    raise ValueError("a number of more than 64 bits")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where text was expected")
    return value


def _number(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("text where a number was expected")
    return value


def vocabulary_of(
    model: SentencePieceModel, model_dir: Path, config: Mapping[str, Any], rows: int
) -> tuple[Vocabulary, dict[str, int]]:
    """Vocabulary and special ids of a directory that has only tokenizer.model, with what tokenizer_config.json adds."""
    file = model_dir / MODEL
    if model.model_type != BPE or model.normalises:
        what = "changes text before cutting it" if model.normalises else "is not a BPE model"
        raise CheckpointError(f"{file} {what}, which llama.cpp cannot run as SentencePiece does")
    added = _added(model_dir, config)
    refuse_excess([len(model.pieces) - 1, *added], file, rows)
    count = max([len(model.pieces), *(number + 1 for number in added)])
    texts = model.pieces + [""] * (count - len(model.pieces))
    types = model.types + [NORMAL] * (count - len(model.pieces))
    for number, (text, control) in added.items():
        texts[number] = text
        if types[number] != UNKNOWN:
            types[number] = CONTROL if control else USER_DEFINED
    missing = set(BYTES) - set(texts)
    if missing:
        raise CheckpointError(
            f"{file} lacks the token {min(missing)}, without which llama.cpp stops on unknown letters"
        )
    known = {text: number for number, text in enumerate(texts)}
    named = {name: _token_text(config.get(f"{name}_token")) for name in ("bos", "eos", "unk", "pad", "sep", "mask")}
    vocabulary = Vocabulary(
        model="llama",
        pre="default",
        # user-defined tokens are looked for before spaces become ▁
        texts=[text.replace(SPACE, " ") if types[n] == USER_DEFINED else text for n, text in enumerate(texts)],
        types=types,
        scores=model.scores + [0.0] * (count - len(model.pieces)),
        merges=None,
        add_space_prefix=model.add_space_prefix,
        notes=[],
    )
    return vocabulary, {**model.special, **{name: known[text] for name, text in named.items() if text in known}}


def _token_text(stated: Any) -> str | None:
    """The text of a token in tokenizer_config.json, which is plain or an object."""
    text = stated.get("content") if isinstance(stated, dict) else stated
    return text if isinstance(text, str) else None


def true_scores(vocabulary: Vocabulary, model: SentencePieceModel) -> Vocabulary:
    """`vocabulary` with the scores of tokenizer.model, if that has the same pieces; else as it is."""
    pieces = [number for number, kind in enumerate(vocabulary.types) if kind == NORMAL and vocabulary.texts[number]]
    same = all(n < len(model.pieces) and model.pieces[n] == vocabulary.texts[n] for n in pieces)
    if not same or model.model_type != BPE:
        return vocabulary
    scores = [
        model.scores[n] if kind == NORMAL and n < len(model.pieces) else 0.0 for n, kind in enumerate(vocabulary.types)
    ]
    return replace(vocabulary, scores=scores)


def _added(model_dir: Path, config: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Tokens added to the pieces by id: text, and whether it is a control token."""
    file = model_dir / "added_tokens.json"
    stated = [(number, text, False) for text, number in (read_json(file) if file.exists() else {}).items()]
    try:
        for number, token in (config.get("added_tokens_decoder") or {}).items():
            stated.append((int(number), token["content"], token.get("special") is True))
        found = {operator.index(number): (str.encode(text).decode(), control) for number, text, control in stated}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{model_dir} has added tokens without an id or a text",
            "see added_tokens_decoder in tokenizer_config.json, and added_tokens.json",
        ) from None
    if min(found, default=0) < 0:
        raise CheckpointError(f"{model_dir} has an added token with the id {min(found)}")
    return found
