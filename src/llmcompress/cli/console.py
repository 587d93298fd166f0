"""What people see: lines, tables, errors; or events, where those are logged. Progress is in watching.py."""

import json
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llmcompress.cli.log import finite, log
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


def say(line: str, whole: bool = False) -> None:
    """A line for people, on stderr, so that stdout stays clean for results.

    A terminal that is narrower gets several, cut between words. whole: one line everywhere, as commands are copied.
    """
    line = printable(line)
    if log.active:
        log.event("message", text=line)
        return
    if err.is_terminal and not err.is_dumb_terminal and not whole:
        fill = partial(textwrap.fill, width=max(err.width, 1), break_long_words=False, break_on_hyphens=False)
        line = "\n".join(map(fill, line.split("\n")))
    err.print(escape(line), highlight=False, soft_wrap=True)


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
    if title is not None:  # not the table's own, which is cut to its width
        out.print(escape(printable(title)), style="italic", highlight=False)
    made = Table(header_style="bold", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(escape(printable(cell)) for cell in row))
    if out.is_terminal:
        out.print(made)
        return
    with out.capture() as printed:  # cells are filled up with blanks, in the last column too
        out.print(made)
    out.file.write("".join(f"{line.rstrip()}\n" for line in printed.get().removesuffix("\n").split("\n")))


def size(count: float) -> str:
    """Bytes for people, in powers of ten."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def next_step(*words: object) -> None:
    """What a person may want to run next, as the last line of a command."""
    if not log.active:
        say(f"next: llmcompress {shlex.join(map(str, words))}", whole=True)


def bits(per_weight: float | None) -> str:
    """The bits of a quantised weight for people, after a comma; nothing where no weight is quantised."""
    return f", {per_weight:.3f} bits per quantised weight" if per_weight is not None else ""


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
