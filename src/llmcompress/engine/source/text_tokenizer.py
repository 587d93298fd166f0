"""The tokenizer of a model directory."""

from pathlib import Path
from typing import Any

from llmcompress.errors import CheckpointError
from llmcompress.store.headers import refuse_links


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model directory, read from disk alone."""
    from transformers import AutoTokenizer

    refuse_links(path)
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises nothing more special
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path} has no usable tokenizer: {line}", "copy the tokenizer files of the original model"
        ) from None
