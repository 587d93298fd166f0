"""What a calibration source is, and how documents become full windows of tokens."""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from llmcompress.errors import CalibrationError

if TYPE_CHECKING:
    from torch import Tensor


class Source(BaseModel):
    """Options of one calibration source (a frozen pydantic model) and the way to its tokens.

    A source file defines a subclass and names it `SOURCE`. `name` is what users type, `accepts` tells them what may be
    given, `detects` says whether a path given to `--calibration` is of its kind.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str]
    needs_tokenizer: ClassVar[bool] = True
    accepts: ClassVar[str]

    @classmethod
    def detects(cls, path: Path) -> bool:
        return False

    def tokens(self, request: "TokenRequest") -> "Tensor":
        """Token ids [samples, length] int64, exactly as many as asked, or CalibrationError."""
        raise TypeError(f"{type(self).__name__} does not give tokens")


class TokenRequest(BaseModel):
    """What a run asks of a source. `model` loads the uncompressed model, ready to run, and is called only by `self`."""

    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True)
    tokenizer: Any
    samples: int = Field(ge=1)
    length: int = Field(ge=2)
    seed: int
    vocab_size: int = Field(ge=1)
    model: Callable[[], Any] | None = None


def refuse_unknown(ids: Sequence[int], tokens: int, origin: str) -> None:
    """CalibrationError for a token id of a text that a model with so many tokens does not have."""
    if ids and max(ids) >= tokens:
        raise CalibrationError(
            f"the tokenizer gives token {max(ids)} for {origin}, but the model has {tokens} tokens",
            "the tokenizer belongs to another model; put the right tokenizer files into the model directory",
        )


def windows(documents: Iterable[Sequence[int]], request: TokenRequest, origin: str) -> "Tensor":
    """Pack documents (token ids each) end to end, cut into full windows, and draw as many as asked.

    Every document is followed by the end-of-sequence token where the tokenizer has one and the document does not end
    with it; no padding, no shortened window. Where the tokenizer puts a beginning-of-sequence token before every text,
    each window begins with it. Windows are drawn without replacement by a generator of their own, seeded with
    `request.seed`, and stay in text order. Returns [samples, length] int64.
    """
    import torch

    end = getattr(request.tokenizer, "eos_token_id", None)
    stream = array("q")
    for document in documents:
        stream.extend(document)
        # the last two: chat templates end with a line break after the end token; the first: OPT opens texts with it
        if end is not None and document and end not in (document[0], *document[-2:]):
            stream.append(end)
    refuse_unknown(stream, request.vocab_size, origin)
    first = opening(request.tokenizer)
    spans = _spans(stream, request.length, first)
    if len(spans) < request.samples:
        raise CalibrationError(
            f"{origin} gives {len(stream)} tokens, which fill {len(spans)} windows of {request.length}; "
            f"{request.samples} were asked for",
            f"use --samples {len(spans)}, a shorter --length, or more text" if spans else "give more text",
        )
    generator = torch.Generator().manual_seed(request.seed)
    drawn = torch.randperm(len(spans), generator=generator)[: request.samples].sort().values
    rows = [stream[start:stop].tolist() for start, stop in (spans[index] for index in drawn.tolist())]
    return torch.tensor([row if len(row) == request.length else [first, *row] for row in rows], dtype=torch.int64)


def opening(tokenizer: Any) -> int | None:
    """The beginning-of-sequence token, if the tokenizer itself puts it before a text.

    Such a model was trained to park its massive activations on that token; a window without it is not what it meets.
    """
    begin: int | None = getattr(tokenizer, "bos_token_id", None)
    if begin is None or list(tokenizer("a")["input_ids"][:1]) != [begin]:
        return None
    return begin


def _spans(stream: Sequence[int], length: int, first: int | None) -> list[tuple[int, int]]:
    """The parts (start, stop) of `stream`, end to end, that fill one window each; what is left over is not used.

    A part is one token short of `length` where `first` has to be put before it.
    """
    spans = []
    start = 0
    while start < len(stream):
        stop = start + length - (first is not None and stream[start] != first)
        spans.append((start, stop))
        start = stop
    return [span for span in spans if span[1] <= len(stream)]


def fingerprint(tokens: "Tensor") -> str:
    """SHA-256 of the shape and the little-endian int64 ids of `tokens` [samples, length]."""
    digest = hashlib.sha256(f"{tuple(tokens.shape)}".encode())
    digest.update(tokens.contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()
