"""The language model inside a multimodal model: seen where it is, or as a model of its own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcompress.engine.source.header_checks import check_numbers
from llmcompress.formats.gguf.family import known_types
from llmcompress.ledger import Ledger
from llmcompress.store.headers import ModelHeaders, Stored

_PARTS = ("text_config", "vision_config", "audio_config")
_OF_WHOLE = ("quantization_config", "architectures", "_name_or_path")

# beginnings of on-disk names in the multimodal model, and in the language model alone
_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("lm_head.", "lm_head."),
)


def text_view(headers: ModelHeaders) -> ModelHeaders:
    """Headers whose config is that of the language model, where there is one inside a multimodal model.

    All tensors stay, under their names. Other headers are returned unchanged.
    """
    if not any(isinstance(headers.config.get(key), Mapping) for key in _PARTS):
        return headers
    from llmcompress.model.skeleton import is_known, load_config, plain

    check_numbers(headers)
    if not is_known(headers.config.get("model_type")):
        return headers
    whole = load_config(headers.path)
    if whole.get_text_config() is whole:
        return headers
    config = {**plain(whole.get_text_config())}
    tied = headers.config.get("tie_word_embeddings")
    if isinstance(tied, bool):
        config["tie_word_embeddings"] = tied
    config |= {key: headers.config[key] for key in _OF_WHOLE if key in headers.config}
    return replace(headers, config=config, wrapper=headers.config)


def in_text_part(name: str) -> str | None:
    """What a tensor, or a module, of the language model in a multimodal one is called in the language model alone."""
    return next((new + name.removeprefix(old) for old, new in _PREFIXES if name.startswith(old)), None)


def text_part(headers: ModelHeaders, ledger: Ledger) -> ModelHeaders:
    """Headers of the language model inside a multimodal model alone, which the ledger notes; else `headers` unchanged.

    Only language models count whose family can be written as GGUF files.
    """
    text: Any = headers.config.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type") not in known_types():
        return headers
    config = text_view(headers).config
    tensors: dict[str, Stored] = {}
    others = 0
    for name, stored in headers.tensors.items():
        own = in_text_part(name)
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
