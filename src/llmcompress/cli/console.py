"""What people see: progress, tables, errors; or events, where those are logged. The only file that imports rich."""

import json
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from llmcompress.cli.log import Logged, finite, log
from llmcompress.engine.process.progress import Progress as RunProgress
from llmcompress.errors import LlmcompressError, printable

# a file or a pipe has no width: nothing is cut off; `:name:` in a path is no emoji
out = Console(width=None if sys.stdout is not None and sys.stdout.isatty() else 100_000, emoji=False)
err = Console(stderr=True, emoji=False)
_document: TextIO | None = None  # stdout, where it is kept for one JSON document


def print_json(data: Any) -> None:
    """The one JSON document of `--json`; null where a figure is not finite."""
    target = _document or sys.stdout
    text = json.dumps(finite(data), indent=2, ensure_ascii=False)
    try:
        text.encode(target.encoding or "utf-8")
    except UnicodeEncodeError:  # half a surrogate pair out of a file, or a terminal without Unicode
        text = json.dumps(finite(data), indent=2)
    target.write(text + "\n")


@contextmanager
def json_alone() -> Iterator[None]:
    """Keep stdout for the JSON document: what libraries or a model's own code print goes to stderr meanwhile."""
    global _document
    before, _document = _document, sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _document = before


def say(line: str) -> None:
    """A line for people, on stderr, so that stdout stays clean for results."""
    if log.active:
        log.event("message", text=printable(line))
        return
    err.print(escape(printable(line)), highlight=False, soft_wrap=True)


def fail(error: LlmcompressError) -> None:
    """An error: what is wrong, then the way out."""
    if log.active:
        log.end(error)
        return
    err.print(f"[bold red]error:[/] {escape(error.message)}", highlight=False, soft_wrap=True)
    if error.hint:
        err.print(f"  [dim]hint:[/] {escape(error.hint)}", highlight=False, soft_wrap=True)


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> None:
    """A plain table on stdout; columns whose numbers are in `right` are aligned to the right."""
    made = Table(
        title=None if title is None else escape(printable(title)),
        title_justify="left",
        header_style="bold",
        box=None,
        pad_edge=False,
    )
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(escape(printable(cell)) for cell in row))
    out.print(made)


def size(count: float) -> str:
    """Bytes for people, in powers of ten."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def next_step(*words: object) -> None:
    """What a person may want to run next, as the last line of a command."""
    if not log.active:
        say(f"next: llmcompress {shlex.join(map(str, words))}")


def bits(per_weight: float | None) -> str:
    """The bits of a quantised weight for people, after a comma; nothing where no weight is quantised."""
    return f", {per_weight:.3f} bits per quantised weight" if per_weight is not None else ""


class Watching(RunProgress):
    """Progress of a run: a bar on a terminal, one plain line per layer elsewhere, nothing if quiet."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.bar: Progress | None = None
        self.seen = 0
        self.begun = time.perf_counter()
        self.losses: list[float] = []
        self.layers = 0

    def __enter__(self) -> "Watching":
        if not self.quiet and err.is_terminal:
            columns = (
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            )  # fmt: skip
            self.bar = Progress(*columns, console=err, transient=True)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def start(self, layers: int, done: int) -> None:
        self.layers, self.begun = layers, time.perf_counter()
        if self.bar is not None:
            self.task = self.bar.add_task("layers", total=layers, completed=done, note="")
        elif not self.quiet and done:
            say(f"{done} of {layers} layers were finished before; going on")

    def gradients(self, done: int, of: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, note=f"gradients {done}/{of}")
        elif not self.quiet and done in (1, of):
            say(f"gradients  {done}/{of} steps")
        self.begun = time.perf_counter()

    def layer(self, number: int) -> None:
        self.losses = []

    def matrix(self, record: dict[str, Any]) -> None:
        self.losses.append(record.get("loss", record["relative_error"] ** 2))
        if self.bar is not None:
            name = record["name"].rpartition(".")[2]
            self.bar.update(self.task, note=f"{name} loss {self.losses[-1]:.2e}{self._rate()}")

    def tokens(self, count: int) -> None:
        self.seen += count
        if self.bar is not None:
            self.bar.update(self.task, note=self._rate().strip())

    def _rate(self) -> str:
        spent = time.perf_counter() - self.begun
        return f"  {self.seen / spent:,.0f} tokens/s" if self.seen and spent > 0 else ""

    def layer_done(self, number: int, seconds: float) -> None:
        if self.bar is not None:
            self.bar.advance(self.task)
        elif not self.quiet:
            mean = sum(self.losses) / max(len(self.losses), 1)
            spent = time.perf_counter() - self.begun
            left = spent / (number + 1) * (self.layers - number - 1)
            which = f"layer {number + 1}/{self.layers}"
            say(f"{which}  {seconds:.1f} s  loss {mean:.2e}{self._rate()}  about {left:.0f} s left")

    def writing(self, total_bytes: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, note="writing")
        elif not self.quiet:
            say(f"writing {size(total_bytes)}")


def watching(quiet: bool) -> "Watching | Logged":
    """Who is told of the progress of a run: people, nobody if `quiet`, or programs."""
    return Logged() if log.active and not quiet else Watching(quiet)


class Steps:
    """A bar on a terminal for work of known length; silent elsewhere."""

    def __init__(self, what: str, quiet: bool) -> None:
        self.what, self.quiet = what, quiet
        self.bar = None if quiet or log.active or not err.is_terminal else Progress(console=err, transient=True)

    def __enter__(self) -> "Steps":
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task(self.what, total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def at(self, done: int, of: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=of)
        elif not self.quiet:
            log.event("progress", what=self.what, done=done, of=of)


def ledger(entries: Sequence[Mapping[str, str]], limit: int = 12) -> None:
    """The decisions a person should know of; many of one kind and reason are shown as one line."""
    if log.active:
        for entry in entries:
            log.event("ledger", **entry)
        return
    grouped: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        grouped.setdefault((entry["kind"], entry["why"]), []).append(entry["subject"])
    for (kind, why), subjects in list(grouped.items())[:limit]:
        subject = subjects[0] if len(subjects) == 1 else f"{subjects[0]} and {len(subjects) - 1} more"
        say(f"note: {kind}: {subject}: {why}")
    if len(grouped) > limit:
        say(f"note: {len(grouped) - limit} more in report.json")
