"""JSON lines: one document per line, as text or as chat messages."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from llmcompress.calib.base import Source, TokenRequest, windows
from llmcompress.calib.documents import decode, encode_row, unreadable
from llmcompress.errors import CalibrationError

if TYPE_CHECKING:
    from torch import Tensor


class Jsonl(Source):
    """Rows with a text field, or with messages, which go through the tokenizer's chat template."""

    name = "jsonl"
    accepts = "a .jsonl file with text or messages in each row"

    path: Path = Field(description="JSON lines file")
    field: str = Field("text", description="field that holds the text or the messages; 'messages' is used without it")

    @classmethod
    def detects(cls, path: Path) -> bool:
        return path.is_file() and path.suffix.lower() == ".jsonl"

    def tokens(self, request: TokenRequest) -> "Tensor":
        documents = (encode_row(request.tokenizer, row, self.field, where) for where, row in _rows(self.path))
        return windows(documents, request, f"{self.path}")


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row with its place in words. Blank lines hold no row."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise unreadable(path, error) from None
    offset = 0
    with file:
        for number, line in enumerate(file, start=1):
            text = decode(line, path, offset)
            offset += len(line)
            if text.strip():
                where = f"{path} line {number}"
                yield where, _row(text, where)


def _row(text: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number or nesting beyond limits"
        raise CalibrationError(
            f"{where} is not JSON: {reason[:1].lower()}{reason[1:]}",
            'every line is one object such as {"text": "..."}',
        ) from None
    if not isinstance(row, dict):
        raise CalibrationError(f"{where} is not a JSON object", 'every line is one object such as {"text": "..."}')
    return row


SOURCE = Jsonl
