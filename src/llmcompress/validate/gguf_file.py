"""Finding the GGUF file that a path names."""

from pathlib import Path

from llmcompress.errors import CheckpointError
from llmcompress.store.gguf_name import shard_of, stem_of
from llmcompress.store.output_file import is_single


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that a directory without config.json holds; None if there is none.

    CheckpointError if a directory holds several models.
    """
    if not path.is_dir():
        return path if is_single(path) else None
    found = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    if len({(stem_of(file), shard_of(file) is None) for file in found}) > 1:
        raise CheckpointError(f"{path} holds several GGUF files", f"name one of them, such as {found[0]}")
    return found[0] if found else None
