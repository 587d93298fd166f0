"""Events for programs, one JSON object a line on stderr: what `--log-format json` asks for.

The first event is `started`, the last one of `done`, `stopped` and `failed`, with the exit code.
"""

import json
import math
import sys
import time
from io import TextIOBase
from typing import Any, TextIO

from llmcompress.engine.process.progress import Progress
from llmcompress.engine.process.ranks import leads
from llmcompress.errors import EXIT_STOPPED, LlmcompressError

_OF_ALL = ("message", "stopped", "failed")  # what any process of a run may say; the first one says the rest


class Log:
    """Where events go; nowhere until it is opened. While it is open, whatever else is printed to stderr is an event."""

    def __init__(self) -> None:
        self._stream: TextIO | None = None
        self._begun = 0.0

    @property
    def active(self) -> bool:
        return self._stream is not None

    def open(self) -> None:
        if self._stream is None:
            self._stream, self._begun = sys.stderr, time.monotonic()
            sys.stderr = _Lines(self)

    def close(self) -> None:
        if self._stream is not None:
            sys.stderr.flush()
            sys.stderr, self._stream = self._stream, None

    def event(self, event: str, /, **fields: Any) -> None:
        """Write one event, with the seconds since the log was opened."""
        if self._stream is not None and (event in _OF_ALL or leads()):
            elapsed = round(time.monotonic() - self._begun, 3)
            self._stream.write(json.dumps(finite({"event": event, "elapsed": elapsed, **fields})) + "\n")
            self._stream.flush()

    def end(self, error: LlmcompressError) -> None:
        """Write the last event of a command that did not succeed."""
        name = "stopped" if error.exit_code == EXIT_STOPPED else "failed"
        self.event(name, exit_code=error.exit_code, message=error.message, hint=error.hint)


log = Log()


class _Lines(TextIOBase):
    """Lines of libraries and warnings, as events."""

    def __init__(self, owner: Log) -> None:
        self._owner, self._rest = owner, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._say(line)
        return len(text)

    def flush(self) -> None:
        rest, self._rest = self._rest, ""
        self._say(rest)

    def _say(self, line: str) -> None:
        if line.strip():
            self._owner.event("message", text=line.rstrip())


class Logged(Progress):
    """Progress of a run as events."""

    def __enter__(self) -> "Logged":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, layers: int, done: int) -> None:
        self.layers, self.losses, self.tokens_seen, self.begun = layers, list[float](), 0, time.perf_counter()
        log.event("running", layers=layers, finished_layers=done)

    def gradients(self, done: int, of: int) -> None:
        log.event("progress", what="gradients", done=done, of=of)
        self.begun = time.perf_counter()

    def layer(self, number: int) -> None:
        self.number, self.losses = number, []

    def stage(self, space: str, matrices: int) -> None:
        log.event("stage", layer=self.number, space=space, matrices=matrices)

    def matrix(self, record: dict[str, Any]) -> None:
        self.losses.append(record.get("loss", record["relative_error"] ** 2))
        log.event("matrix", layer=self.number, **record)

    def tokens(self, count: int) -> None:
        self.tokens_seen += count

    def layer_done(self, number: int, seconds: float) -> None:
        spent = time.perf_counter() - self.begun
        log.event(
            "layer",
            layer=number,
            of=self.layers,
            seconds=round(seconds, 3),
            loss=sum(self.losses) / max(len(self.losses), 1),
            tokens_per_second=round(self.tokens_seen / spent, 1) if spent > 0 else None,
        )

    def writing(self, total_bytes: int) -> None:
        log.event("writing", bytes=total_bytes)


def finite(data: Any) -> Any:
    """Plain data with null for numbers that JSON does not know: infinities, and what is no number."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    return [finite(value) for value in data] if isinstance(data, list | tuple) else data
