"""The project's own texts, `calib_data/`: in the installed package, or in the source checkout beside `src`."""

from pathlib import Path
from typing import TYPE_CHECKING

from llmcompress.calib.base import Source, TokenRequest, windows
from llmcompress.calib.documents import Document, token_ids
from llmcompress.calib.text import text_files
from llmcompress.errors import CalibrationError

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = Path(__file__).resolve().parents[1]


class Default(Source):
    """Prose, dialogue, code, mathematics, lists and other languages, written for this project (CC0)."""

    name = "default"
    accepts = "'default' (texts that come with llmcompress)"

    def tokens(self, request: TokenRequest) -> "Tensor":
        # .txt alone: the folder's README is about the texts, not one of them
        files = text_files(shipped("calib_data"), suffixes=(".txt",))
        documents = (Document(str(file), file) for file in files)
        return windows(token_ids(request.tokenizer, documents, "calib_data"), request, "calib_data")


def shipped(name: str) -> Path:
    """Where a folder that comes with llmcompress is: calib_data, eval_data or configs."""
    places = (PACKAGE / name, PACKAGE.parents[1] / name)
    for folder in places:
        if folder.is_dir():
            return folder
    raise CalibrationError(
        f"this installation lacks its {name}, which belong in {places[0]}",
        "install llmcompress again, or give a file of your own",
    )


SOURCE = Default
