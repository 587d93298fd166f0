"""What stands beside the weights, compared with the source: the values of config.json, and files that are copied."""

import filecmp
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcompress.validate.directory import Directory
from llmcompress.validate.mlx_codes import MLX_KEYS
from llmcompress.validate.published import CARD, REPORT, present_files
from llmcompress.validate.stored import INDEX

_OWN = {
    "config.json",
    "quantize_config.json",
    "hf_quant_config.json",
    "llmcompress.yaml",
    "transforms.npz",
    "channels.npz",
    INDEX,
    CARD,
    REPORT,
}
_LOADED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
           "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
           "generation_config.json", "preprocessor_config.json", "processor_config.json")  # fmt: skip


def config_differences(directory: Directory, config: Mapping[str, Any]) -> set[str]:
    """Keys of config.json whose values differ from those of the source's `config`, but for what formats say.

    A rotation ends that the head is the embedding.
    """
    mine = directory.config
    said = {"quantization_config"} | (set() if directory.form != "mlx" else MLX_KEYS - config.keys())
    if "quantization_config" in config:
        said.add("quantization")  # as MLX calls the same
    keys = (config.keys() | mine.keys()) - said
    changed = {key for key in keys if (key in config) != (key in mine) or _text(config[key]) != _text(mine[key])}
    untied = directory.rotated and mine.get("tie_word_embeddings") is False
    return changed - {"tie_word_embeddings"} if untied else changed


def _text(value: Any) -> str:
    """A value as JSON, by which 1, 1.0 and true differ."""
    return json.dumps(value, sort_keys=True)


def side_file_wrongs(directory: Directory, source: Path) -> list[str]:
    """Copied files that are not, byte for byte, those of the source; and files of the source that are not there."""
    copied = {name for name in present_files(directory.path) if name not in _OWN and not name.endswith(".safetensors")}
    recorded = directory.report.get("files")
    copied &= set(recorded) if isinstance(recorded, dict) else copied
    wrong = [f"{name} does not come from the source" for name in sorted(copied) if not (source / name).is_file()]
    wrong += [
        f"{name} is not that of the source"
        for name in sorted(copied)
        if (source / name).is_file() and not filecmp.cmp(directory.path / name, source / name, shallow=False)
    ]
    lacking = [name for name in _LOADED if (source / name).is_file() and not (directory.path / name).is_file()]
    return wrong + [f"{name} of the source is missing" for name in lacking]
