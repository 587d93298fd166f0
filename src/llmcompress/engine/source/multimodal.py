"""The language model inside a multimodal model, as a model of its own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcompress.formats.gguf.family import known_types
from llmcompress.ledger import Ledger
from llmcompress.store.headers import ModelHeaders, Stored

# beginnings of on-disk names in the multimodal model, and in the language model alone
_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("lm_head.", "lm_head."),
)


def text_part(headers: ModelHeaders, ledger: Ledger) -> ModelHeaders:
    """Headers of the language model inside a multimodal model, which the ledger notes; else `headers` unchanged.

    Only language models count whose family can be written as GGUF files.
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
    """The config of the language model, defaults written out."""
    from llmcompress.model.skeleton import load_config, plain

    config = {**plain(load_config(headers.path).get_text_config())}
    tied = headers.config.get("tie_word_embeddings")
    if isinstance(tied, bool):
        config["tie_word_embeddings"] = tied
    for key in ("quantization_config", "architectures", "_name_or_path"):
        if key in headers.config:
            config[key] = headers.config[key]
    return config
