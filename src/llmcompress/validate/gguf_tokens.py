"""Checks of a GGUF file's tokenizer: complete by itself, and the same as the source model's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmcompress.formats.gguf.chattemplates import DEFAULT, read_templates
from llmcompress.store.gguf_header import GgufHeader, scalar_value
from llmcompress.store.headers import read_json

_KEY = "tokenizer.ggml"
_TEMPLATE = "tokenizer.chat_template"
_TYPES = range(1, 7)


def tokens_of(header: GgufHeader) -> list[str]:
    """The texts of the tokens; CheckpointError if the file has none."""
    tokens = header.value(f"{_KEY}.tokens")
    return tokens if isinstance(tokens, list) else []


def token_wrongs(header: GgufHeader) -> list[str]:
    """Faults of a file's tokenizer, including faults that llama.cpp would not notice."""
    tokens, rows = tokens_of(header), header.tensors["token_embd.weight"].shape[0]
    wrong = [] if len(tokens) == rows else [f"{len(tokens)} tokens, but {rows} rows of the embedding"]
    if len(set(tokens)) < len(tokens) or "" in tokens:
        wrong.append("not every token has a text of its own")
    types = np.asarray(header.value(f"{_KEY}.token_type"))
    if len(types) != len(tokens) or not np.isin(types, _TYPES).all():
        wrong.append("the types of tokens do not fit them")
    model = scalar_value(header, f"{_KEY}.model")
    if model == "gpt2":
        merges = header.value(f"{_KEY}.merges")
        if not isinstance(merges, list) or not all(merge.count(" ") == 1 for merge in merges):
            wrong.append("merges are not pairs of texts")
    elif model == "llama":
        scores = np.asarray(header.value(f"{_KEY}.scores"))
        if len(scores) != len(tokens) or not np.isfinite(scores).all():
            wrong.append("the scores of tokens do not fit them")
    else:
        wrong.append(f"tokenizer model {model!r} is not known")
    special = [key for key in header.fields if key.startswith(f"{_KEY}.") and key.endswith("_token_id")]
    for key in sorted({f"{_KEY}.bos_token_id", f"{_KEY}.eos_token_id", *special}):
        number = scalar_value(header, key)
        if not isinstance(number, int) or not 0 <= number < len(tokens):
            wrong.append(f"{key} is {number}, which is no token")
    return wrong


def against_source(header: GgufHeader, model_dir: Path) -> list[str]:
    """Differences of token texts, merges and chat template from the tokenizer files of `model_dir`."""
    wrong = []
    settings = model_dir / "tokenizer_config.json"
    template = read_templates(model_dir, read_json(settings) if settings.exists() else {}).get(DEFAULT)
    if scalar_value(header, _TEMPLATE) != template:
        wrong.append("the chat template is not that of the source")
    file = model_dir / "tokenizer.json"
    if not file.exists():
        return wrong
    state = read_json(file)
    added = {token["id"] for token in state["added_tokens"]}
    tokens, merges = tokens_of(header), state["model"]["merges"]
    other = [
        text
        for text, number in state["model"]["vocab"].items()
        if number not in added and tokens[number : number + 1] != [text]
    ]
    if other:
        wrong.append(f"{len(other)} tokens have another text than in {file.name}, such as {other[0]!r}")
    if f"{_KEY}.merges" in header.fields and header.value(f"{_KEY}.merges") != [_pair(merge) for merge in merges]:
        wrong.append(f"the merges are not those of {file.name}")
    return wrong


def _pair(merge: str | Sequence[Any]) -> str:
    """A merge as one text, as in GGUF; newer tokenizer.json files hold two texts."""
    return merge if isinstance(merge, str) else " ".join(part.replace(" ", "Ġ") for part in merge)
