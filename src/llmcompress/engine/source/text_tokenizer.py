"""The tokenizer of a model directory."""

from pathlib import Path
from typing import Any

from llmcompress.errors import CheckpointError
from llmcompress.isolation import probe
from llmcompress.store.headers import refuse_links
from llmcompress.store.side_files import has_tokenizer, tokenizer_size


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model directory, read from disk alone, where it loads and encodes a letter within limits."""
    from transformers import AutoTokenizer

    def failed(reason: str) -> CheckpointError:
        return CheckpointError(
            f"{path} has no usable tokenizer: {reason}", "copy the tokenizer files of the original model"
        )

    def load() -> Any:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)

    refuse_links(path)
    if path.is_dir() and not has_tokenizer(path):
        raise CheckpointError(
            f"{path} has no tokenizer, without which no text can be read",
            "copy tokenizer.json and the files beside it from the original model, or give token ids as --calibration",
        )
    if not trust_remote_code:  # which may do all that we may do
        probe(lambda: load()("a"), failed, tokenizer_size(path))
    try:
        return load()
    except Exception as error:  # the tokenizers library raises nothing more special
        raise failed(next(iter(str(error).strip().splitlines()), type(error).__name__)) from None
