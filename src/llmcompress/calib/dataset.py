"""Tables read by the `datasets` library from disk: a folder written by save_to_disk, or a parquet file."""

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pydantic import Field

from llmcompress.calib.base import Source, TokenRequest, windows
from llmcompress.calib.documents import Document, token_ids
from llmcompress.errors import CalibrationError
from llmcompress.extras import needs_extra

if TYPE_CHECKING:
    from torch import Tensor


class Dataset(Source):
    """Rows of a local table with a text column, or with messages, which go through the tokenizer's chat template."""

    name = "dataset"
    accepts = "a folder written by datasets' save_to_disk, or a .parquet file"

    path: Path = Field(description="folder written by save_to_disk, or parquet file")
    field: str = Field("text", description="column that holds the text or the messages; 'messages' is used without it")
    split: str | None = Field(None, description="split to read, where the folder holds several")

    @classmethod
    def detects(cls, path: Path) -> bool:
        return is_saved(path) or (path.is_file() and path.suffix.lower() == ".parquet")

    def model_post_init(self, context: Any, /) -> None:
        """Refuse before anything is computed where the library is missing."""
        needs_extra("datasets", "data", f"reading {self.path}")

    def tokens(self, request: TokenRequest) -> "Tensor":
        with TemporaryDirectory(prefix="llmcompress-") as cache:
            files = [self.path] if self.path.is_file() else [file for file in self.path.rglob("*") if file.is_file()]
            size = sum(file.stat().st_size for file in files)
            return windows(
                token_ids(request.tokenizer, self._rows(cache), f"{self.path}", size), request, f"{self.path}"
            )

    def _rows(self, cache: str) -> Iterator[Document]:
        """The rows. A table is opened where it is read: small files can unpack to large tables."""
        with _quiet():
            table = self._open(cache)
            columns = [name for name in dict.fromkeys((self.field, "messages")) if name in table.column_names]
            if not columns:
                raise CalibrationError(
                    f"{self.path} has no column {self.field!r} or 'messages'; it has {', '.join(table.column_names)}",
                    "say which field holds the text",
                )
            # only these: a column of images would be decoded row by row
            for at, row in enumerate(table.select_columns(columns)):
                yield Document(f"{self.path} row {at}", row, self.field)

    def _open(self, cache: str) -> Any:
        """The table of the split asked for, or of the only one; what `datasets` writes on the way stays in `cache`."""
        from datasets import Dataset as Table
        from datasets import load_from_disk
        from datasets.exceptions import DatasetsError

        try:
            if self.path.is_dir():
                loaded = load_from_disk(str(self.path))
            else:
                # escaped: datasets takes a path for a glob pattern
                loaded = Table.from_parquet(glob.escape(str(self.path)), cache_dir=cache)
        except (OSError, ValueError, LookupError, TypeError, DatasetsError) as error:
            raise CalibrationError(
                f"datasets cannot read {self.path}: {type(error).__name__}: {error}",
                "give a folder written by save_to_disk, or a .parquet file",
            ) from None
        splits = loaded if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}
        split = next(iter(splits)) if self.split is None and len(splits) == 1 else self.split
        if split not in splits:
            found = "several splits" if split is None else f"no split {split!r}"
            raise CalibrationError(f"{self.path} has {found}", f"name one with split: {', '.join(splits)}")
        return splits[split]


def table_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of a local table of one split with its place in words."""
    source = Dataset(path=path)
    with TemporaryDirectory(prefix="llmcompress-") as cache, _quiet():
        for at, row in enumerate(source._open(cache)):
            yield f"{path} row {at}", row


def is_saved(path: Path) -> bool:
    """Whether `path` is a folder as save_to_disk writes it, of one split or of several."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and log lines of `datasets`, which are put back as they were."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    shown, verbosity = not are_progress_bars_disabled(), logging.get_verbosity()
    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            enable_progress_bars()


SOURCE = Dataset
