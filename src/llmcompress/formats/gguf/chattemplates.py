"""Chat templates of a model directory, from the places that transformers knows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcompress.errors import CheckpointError
from llmcompress.store.headers import read_json

DEFAULT = "default"


def read_templates(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, the usual one under `DEFAULT`, names in order; empty where the model has none.

    config: tokenizer_config.json. Files win over what stands in it, as in transformers.
    """
    found = {file.stem: _text(file) for file in sorted((model_dir / "additional_chat_templates").glob("*.jinja"))}
    if (model_dir / "chat_template.jinja").exists():
        found[DEFAULT] = _text(model_dir / "chat_template.jinja")
    if not found:
        found = _listed(config.get("chat_template"), model_dir / "tokenizer_config.json")
    if not found and (model_dir / "chat_template.json").exists():
        file = model_dir / "chat_template.json"
        found = _listed(read_json(file).get("chat_template"), file)
    return dict(sorted(found.items()))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None


def _listed(value: Any, file: Path) -> dict[str, str]:
    """Templates of a JSON value: none, one as text, or a list of objects with name and template."""
    if value is None:
        return {}
    entries = [{"name": DEFAULT, "template": value}] if isinstance(value, str) else value
    try:
        found = {entry["name"]: entry["template"] for entry in entries}
        for item in (*found, *found.values()):
            item.encode()
    except (TypeError, KeyError, AttributeError, UnicodeEncodeError):
        raise CheckpointError(f"{file} has a chat_template that is neither text nor a list of named texts") from None
    return found
