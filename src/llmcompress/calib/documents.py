"""From files and rows to the token ids of a document; shared by the sources that read text."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from llmcompress.errors import CalibrationError
from llmcompress.isolation import Limit, isolated

_LARGEST = 1_000_000_000  # bytes of a file of text

# some chat templates write today's date through this function; a macro of its name keeps the ids the same on every day
DATE = datetime(2025, 1, 1)
FIXED_DATE = (
    "{% macro strftime_now(format) -%}{{ format"
    + "".join(f" | replace('%{code}', '{DATE:%{code}}')" for code in "YymdBbAaHIMSpj")
    + " }}{%- endmacro %}{{ '' }}"  # the empty output keeps a line break at the start of the template
)


def unreadable(path: Path, error: OSError) -> CalibrationError:
    """What to raise where the system refuses to open `path`."""
    return CalibrationError(
        f"cannot read {path}: {error.strerror or error}", "check the path given as calibration data"
    )


def decode(data: bytes, path: Path, offset: int = 0) -> str:
    """`data` as text; `offset` is where in `path` it begins, for the message that names the first invalid byte."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"{path} is not valid UTF-8 at byte {offset + error.start}", "convert it, for instance with iconv"
        ) from None
    # a byte order mark or another system's line ends must not change the tokens
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def read_text(path: Path) -> str:
    """The text of `path`; an empty file is refused, since the set would be smaller than its file list says."""
    readable_size(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    text = decode(data, path)
    if not text.strip():
        raise CalibrationError(f"{path} holds no text", "remove the file or fill it")
    return text


def readable_size(path: Path) -> int:
    """The size of a file of text; CalibrationError for one that is too large to be read at once."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from None
    if size > _LARGEST:
        raise CalibrationError(f"{path} has {size:,} bytes, {_LARGEST:,} at most are read at once", "split the file")
    return size


def encode(tokenizer: Any, text: str, where: str, *, special_tokens: bool = True) -> list[int]:
    """Token ids of `text` with the special tokens that the tokenizer itself adds; none for blank text.

    The tokenizer's own limit on length and any truncation or padding saved with it do not apply: windows are cut later.
    """
    if not text.strip():
        return []
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CalibrationError(
            f"{where} holds half a surrogate pair at character {error.start}",
            "write the character as UTF-8 or as both halves",
        ) from None
    try:
        return list(tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"])
    except MemoryError:  # which says nothing
        raise
    except Exception as error:  # the tokenizers library raises nothing more special
        raise CalibrationError(
            f"the model's tokenizer fails on {where}: {error}", "copy the tokenizer files of the original model"
        ) from None


class Document(NamedTuple):
    """A text, a file of text, or a row that holds a text in its `field` or as messages. where: its place, in words.

    special_tokens: whether a text gets those that the tokenizer itself adds.
    """

    where: str
    content: str | Path | Mapping[str, Any]
    field: str = "text"
    special_tokens: bool = True

    @property
    def nbytes(self) -> int:
        """About how large it is."""
        if isinstance(self.content, Path):
            return readable_size(self.content)
        return len(self.content) if isinstance(self.content, str) else len(repr(self.content))

    def encoded(self, tokenizer: Any) -> list[int]:
        """Its token ids, as `encode` and `encode_row` give them."""
        if isinstance(self.content, Path):
            return encode(tokenizer, read_text(self.content), self.where)
        if isinstance(self.content, str):
            return encode(tokenizer, self.content, self.where, special_tokens=self.special_tokens)
        return encode_row(tokenizer, self.content, self.field, self.where)


def token_ids(tokenizer: Any, documents: Iterable[Document], origin: str, mapped: int = 0) -> Iterator["array[int]"]:
    """The token ids of each document. Documents are read and encoded in a process of their own, within limits.

    mapped: bytes of files that reading the documents keeps in its address space, and unpacks.
    """
    for ids in _each(
        lambda document: array("q", document.encoded(tokenizer)).tobytes(), documents, origin, mapped // 5
    ):
        yield array("q", ids)


def prompts(tokenizer: Any, rows: Iterable[Document], origin: str) -> Iterator[str]:
    """Rows of `messages` as texts, each up to where the assistant's answer begins, in a process of their own.

    A system message that the template refuses is left out.
    """

    def rendered(row: Document) -> bytes:
        assert isinstance(row.content, Mapping)
        messages = row.content["messages"]
        try:
            text = _chat(tokenizer, messages, row.where, answered=False)
        except CalibrationError:
            if messages[0]["role"] != "system":
                raise
            text = _chat(tokenizer, messages[1:], row.where, answered=False)
        return text.encode(errors="surrogatepass")

    for text in _each(rendered, rows, origin, 0):
        yield text.decode(errors="surrogatepass")


def _each(made: Callable[[Document], bytes], documents: Iterable[Document], origin: str, held: int) -> Iterator[bytes]:
    """What is made of each document, in a process of its own, within limits.

    A tokenizer or a chat template is a program of whoever made the checkpoint. held: bytes beyond a document's own.
    """
    place = [origin]

    def work(limit: Limit) -> Iterator[bytes]:
        limit(held)
        for document in documents:
            place[0] = document.where
            yield document.where.encode(errors="surrogateescape")
            limit(held + document.nbytes)
            data = made(document)
            limit(held)
            yield data

    def failed(reason: str) -> CalibrationError:
        return CalibrationError(
            f"the model's tokenizer or chat template fails on {place[0]}: {reason}",
            "copy the tokenizer files of the original model, or give another text",
        )

    found = isolated(work, failed)
    for where in found:
        place[0] = where.decode(errors="surrogateescape")
        yield next(found)


def encode_row(tokenizer: Any, row: Mapping[str, Any], field: str, where: str) -> list[int]:
    """Token ids of a row: its `field` if it has one (text or chat messages), else its `messages`.

    None counts as absent: a table has every column in every row.
    """
    name = field if row.get(field) is not None else "messages"
    value = row.get(name)
    if isinstance(value, str):
        return encode(tokenizer, value, where)
    if isinstance(value, list):
        return encode(tokenizer, _chat(tokenizer, value, f"{name} of {where}"), where, special_tokens=False)
    if value is None:
        present = ", ".join(key for key in row if row[key] is not None) or "nothing"
        raise CalibrationError(
            f"{where} has neither {field!r} nor 'messages'; it has {present}",
            "say which field holds the text, or remove the row",
        )
    raise CalibrationError(
        f"{name!r} of {where} is {type(value).__name__}, neither text nor a list of messages",
        "say which field holds the text",
    )


def _joined(value: Any) -> Any:
    """Text in parts as one text, which every template takes; any other value as it is."""
    parts = value if isinstance(value, list) else []
    said = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    texts = [text for text in said if isinstance(text, str)]
    return "".join(texts) if parts and len(texts) == len(parts) else value


def _chat(tokenizer: Any, messages: list[Any], what: str, *, answered: bool = True) -> str:
    """`messages` (role and content each) as text, through the tokenizer's chat template, which adds special tokens.

    answered: whether that is all; else the beginning of the assistant's answer follows.
    """
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise CalibrationError(f"{what} holds a message without a role", "a message is {role: ..., content: ...}")
    if not messages:
        raise CalibrationError(f"{what} is an empty list", "remove the row")
    if not getattr(tokenizer, "chat_template", None):
        raise CalibrationError(
            f"{what} needs a chat template, and the model's tokenizer has none",
            "use rows with text, or put chat_template.jinja into the model directory",
        )
    # a table fills the keys that other messages have with None; templates ask whether a key is defined
    given = [{key: _joined(value) for key, value in message.items() if value is not None} for message in messages]
    try:
        template = tokenizer.get_chat_template()
        dated = FIXED_DATE + template if "strftime_now" in template else template
        text: str = tokenizer.apply_chat_template(
            given, chat_template=dated, tokenize=False, add_generation_prompt=not answered
        )
    # a template is a program of the checkpoint's; transformers runs it in a sandbox, where it may still fail in any way
    except MemoryError:  # which says nothing
        raise
    except Exception as error:
        raise CalibrationError(
            f"the chat template refuses {what}: {error}", "change or remove the row, or use a field with text"
        ) from None
    return text
