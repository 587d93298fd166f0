"""The part of a multimodal model that reads and writes text, as a model of its own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcompress.formats.gguf.family import known_types
from llmcompress.ledger import Ledger
from llmcompress.store.headers import ModelHeaders, Stored

# of names on disk, and what they begin with in the model of the text alone
_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("lm_head.", "lm_head."),
)


def text_part(headers: ModelHeaders, ledger: Ledger) -> ModelHeaders:
    """Headers of the language model in a multimodal one, as the ledger says; `headers` themselves of any other.

    Language models are looked for that are of a family of which GGUF files can be written.
    """
    text = headers.config.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type") not in known_types():
        return headers
    config = _text_config(headers)
    tensors: dict[str, Stored] = {}
    others = 0
    for name, stored in headers.tensors.items():
        own = next((new + name.removeprefix(old) for old, new in _PREFIXES if name.startswith(old)), None)
        if own is None:
            others += 1
        else:
            tensors[own] = Stored(replace(stored.spec, name=own), stored.file, stored.begin, stored.end)
    ledger.note(
        "text_only",
        str(headers.config.get("model_type")),
        f"a multimodal model: its text part ({config['model_type']}) alone is written, {others} other tensors are not",
    )
    return replace(headers, config=config, tensors=tensors)


def _text_config(headers: ModelHeaders) -> dict[str, Any]:
    """What config.json says of the text, with what it leaves to defaults."""
    from llmcompress.model.skeleton import load_config, plain

    config = {**plain(load_config(headers.path).get_text_config())}
    tied = headers.config.get("tie_word_embeddings")
    if isinstance(tied, bool):
        config["tie_word_embeddings"] = tied
    for key in ("quantization_config", "architectures", "_name_or_path"):
        if key in headers.config:
            config[key] = headers.config[key]
    return config
