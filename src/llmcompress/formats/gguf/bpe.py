"""The vocabulary of a tokenizer of the tokenizers library, as llama.cpp's two kinds of BPE take it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcompress.errors import CheckpointError
from llmcompress.formats.gguf.pretokenizer import WordCutter, families_like
from llmcompress.formats.gguf.spm import sentencepiece_like
from llmcompress.formats.gguf.vocabulary import (
    NORMAL,
    Vocabulary,
    added_type,
    refuse_excess,
    refuse_pre,
    steps_of,
    stripping,
    texts_by_id,
)


def read_vocabulary(backend: Any, file: Path, rows: int, pre: str | None) -> Vocabulary:
    """Vocabulary of `backend`, a `tokenizers.Tokenizer`; `file` is named in errors.

    CheckpointError for more tokens than `rows` and for whatever llama.cpp would take another way.
    """
    ids = backend.get_vocab(with_added_tokens=False)
    refuse_excess(ids.values(), file, rows)  # before `to_str`, which counts up to the highest
    state = json.loads(backend.to_str())
    model = state["model"]
    if model["type"] != "BPE":
        raise _unsupported(file, f"a {model['type']} tokenizer")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise _unsupported(file, "a BPE tokenizer with marks at the edges of words")
    added = {token["id"]: token for token in state["added_tokens"]}
    refuse_excess(added, file, rows)
    texts = texts_by_id(ids, added, file)
    if "ByteLevel" in {step["type"] for step in steps_of(state["pre_tokenizer"], "pretokenizers")}:
        return _byte_level(state, backend, texts, added, file, pre)
    if model["byte_fallback"]:
        refuse_pre(pre, file)
        return sentencepiece_like(state, ids, texts, added, file)
    raise _unsupported(file, "a BPE tokenizer that is neither byte-level nor falls back to bytes")


def _unsupported(file: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is {what}, which llama.cpp cannot run from a GGUF file", "BPE works: byte-level, or with byte_fallback"
    )


def _byte_level(
    state: Mapping[str, Any],
    backend: Any,
    texts: list[str],
    added: Mapping[int, Mapping[str, Any]],
    file: Path,
    pre: str | None,
) -> Vocabulary:
    forms = [step["type"] for step in steps_of(state["normalizer"], "normalizers")]
    if set(forms) - {"NFC"}:
        raise CheckpointError(
            f"{file} changes text before cutting it ({', '.join(forms)}), which llama.cpp does not do"
        )
    notes = ["llama.cpp does not bring text into the form NFC, as this tokenizer does"] if forms else []
    if pre is None:
        family = _family(backend.pre_tokenizer, state["model"]["ignore_merges"], file)
        pre, notes = family.name, notes + ([family.note] if family.note else [])
    elif pre not in {family.name for family in families_like(backend.pre_tokenizer)}:
        notes = [*notes, f"that {pre} cuts text as this tokenizer does was taken on trust (--pre)"]
    if not state["model"]["merges"]:
        raise CheckpointError(f"{file} has no merges, and llama.cpp loads no byte-level tokenizer without them")
    return Vocabulary(
        model="gpt2",
        pre=pre,
        texts=texts,
        types=[added_type(added[number]) if number in added else NORMAL for number in range(len(texts))],
        scores=None,
        # llama.cpp splits at the first space: those inside a part are shifted as bytes are in the byte-level alphabet
        merges=[" ".join(part.replace(" ", "Ġ") for part in pair) for pair in state["model"]["merges"]],
        add_space_prefix=False,
        notes=notes + stripping(added),
    )


def _family(pre_tokenizer: Any, ignore_merges: bool, file: Path) -> WordCutter:
    """The family of a pre-tokenizer; CheckpointError where none is known."""
    alike = families_like(pre_tokenizer)
    for family in alike:
        if family.ignore_merges == ignore_merges:
            return family
    if alike:
        name = alike[0].name
        taken = "whole" if ignore_merges else "by merges"
        raise CheckpointError(
            f"{file} cuts text as {name} does, but takes words that are tokens {taken}, which {name} does not",
            f"if few words are concerned: --pre {name}",
        )
    raise CheckpointError(
        f"{file} cuts text into words in a way that is not known here, and a wrong name would degrade the model",
        "give the name llama.cpp has for this model's pre-tokenizer: --pre NAME",
    )
