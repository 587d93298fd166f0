"""JSON lines: one document per line, as text or as chat messages."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from llmcompress.calib.base import Source, TokenRequest, windows
from llmcompress.calib.documents import Document, decode, token_ids, unreadable
from llmcompress.errors import CalibrationError

if TYPE_CHECKING:
    from torch import Tensor


_LONGEST_ROW = 50_000_000  # bytes


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
        documents = (Document(where, row, self.field) for where, row in json_rows(self.path))
        return windows(token_ids(request.tokenizer, documents, f"{self.path}"), request, f"{self.path}")


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row with its place in words. Blank lines hold no row."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise unreadable(path, error) from None
    offset = 0
    with file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_ROW + 1), b""), start=1):
            if len(line) > _LONGEST_ROW:
                raise CalibrationError(f"{path} line {number} has more than {_LONGEST_ROW:,} bytes", "split the row")
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
