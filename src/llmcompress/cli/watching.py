"""Progress for people: a bar on a terminal with finished layers above it, plain lines elsewhere; or events."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llmcompress.cli import console
from llmcompress.cli.log import Logged, log
from llmcompress.engine.process.progress import Progress

if TYPE_CHECKING:
    from typing import Self

_SHORTEST = 8  # columns of a bar; what does not fit beside it is left out
_OFTEN = 10.0  # seconds between two lines of work of known length, where there is no bar


class Bar:
    """One line at the bottom of a terminal: what is done, a bar, and as much as fits of how far it is."""

    def __init__(self, what: str) -> None:
        self.what, self.share, self.count, self.note, self.rate, self.left = what, 0.0, "", "", "", ""
        self.live = Live(self, console=console.err, transient=True, refresh_per_second=8)

    def __rich_console__(self, terminal: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - len(self.what) - 1 - _SHORTEST - 1  # a line as wide as the terminal may wrap
        wanted: dict[str, str] = {}
        for name in ("count", "left", "note", "rate"):  # what matters most comes first
            text: str = getattr(self, name)
            if text and len(text) + 1 <= room:
                wanted[name] = text
                room -= len(text) + 1
        line = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
        bar = ProgressBar(total=1.0, completed=self.share, width=_SHORTEST + max(0, min(room, 32)))
        shown = [wanted[name] for name in ("count", "note", "rate", "left") if name in wanted]
        for _ in range(2 + len(shown)):
            line.add_column(no_wrap=True, overflow="crop")
        line.add_row(Text(self.what), bar, *map(Text, shown))
        yield line


def _draws(quiet: bool) -> bool:
    """Whether a line can be drawn anew: on a terminal that has a cursor to move."""
    return not (quiet or log.active) and console.err.is_terminal and not console.err.is_dumb_terminal


@contextmanager
def reading(quiet: bool) -> Iterator[None]:
    """A line on a terminal while libraries, headers and plans are read, which takes seconds.

    It is drawn once, by no thread, since other processes are forked meanwhile.
    """
    if not _draws(quiet):
        yield
        return
    with Live(Text("reading ..."), console=console.err, transient=True, auto_refresh=False):
        yield


def duration(seconds: float) -> str:
    """A time that is estimated, for people."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


class _Barred:
    """Has a bar on the terminal, where one is drawn, from its beginning to its end."""

    bar: Bar | None

    def __enter__(self) -> "Self":
        if self.bar is not None:
            self.bar.live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.live.stop()


class Watching(_Barred, Progress):
    """Progress of a run: a line for each layer, above a bar on a terminal; nothing if quiet."""

    def __init__(self, quiet: bool, sections: Sequence[int]) -> None:
        """sections: the number of matrices of each layer, and of what follows the layers."""
        self.quiet, self.sections = quiet, sections
        self.bar = Bar("layers") if _draws(quiet) else None
        self.seen = self.solved = self.layers = self.before = self.finished = 0
        self.begun = time.perf_counter()
        self.losses: list[float] = []

    def start(self, layers: int, done: int) -> None:
        self.layers, self.before, self.begun = layers, done, time.perf_counter()
        if done:
            self._say(f"{done} of {layers} layers were finished before; going on")
        self._draw()

    def gradients(self, done: int, of: int) -> None:
        if done in (1, of):
            self._say(f"gradients  {done}/{of} steps")
        self.begun = time.perf_counter()
        self._draw(f"gradients {done}/{of}")

    def layer(self, number: int) -> None:
        self.losses, self.solved = [], 0

    def matrix(self, record: dict[str, Any]) -> None:
        self.losses.append(record.get("loss", record["relative_error"] ** 2))
        self.solved += 1
        self._draw(record["name"].rpartition(".")[2])

    def tokens(self, count: int) -> None:
        self.seen += count
        self._draw()

    def layer_done(self, number: int, seconds: float) -> None:
        self.finished, self.solved = self.finished + 1, 0
        parts = [f"layer {number + 1}/{self.layers}", f"{seconds:.1f} s"]
        parts.append(f"loss {sum(self.losses) / max(len(self.losses), 1):.2e}")
        parts += [part for part in (self._rate(), self._left(self.finished)) if part]
        while self.bar is not None and len(parts) > 1 and len("  ".join(parts)) > console.err.width:
            parts.pop()
        self._draw()
        self._say("  ".join(parts))

    def writing(self, total_bytes: int) -> None:
        self._draw("writing")
        self._say(f"writing {console.size(total_bytes)}")

    def _say(self, line: str) -> None:
        if not self.quiet:
            console.say(line)

    def _draw(self, note: str = "") -> None:
        """Put what is known into the bar. note: what was done just now."""
        if self.bar is None:
            return
        bar, at = self.bar, self.before + self.finished
        matrices = self.sections[at] if at < len(self.sections) else 0
        inside = self.solved / matrices if matrices else 0.0
        bar.count, bar.share = f"{at}/{self.layers}", (at + min(inside, 1.0)) / max(self.layers, 1)
        bar.note, bar.rate, bar.left = note or bar.note, self._rate(), self._left(self.finished + inside)

    def _rate(self) -> str:
        spent = time.perf_counter() - self.begun
        return f"{self.seen / spent:,.0f} tokens/s" if self.seen and spent > 0 else ""

    def _left(self, done: float) -> str:
        """How long the rest takes, going by what this start has done, in layers."""
        rest = self.layers - self.before - done
        return f"about {duration((time.perf_counter() - self.begun) / done * rest)} left" if done and rest else ""


def of_run(quiet: bool, sections: Sequence[int]) -> "Watching | Logged":
    """Who is told of the progress of a run: people, nobody if `quiet`, or programs. sections: as in `Watching`."""
    return Logged() if log.active and not quiet else Watching(quiet, sections)


class Steps(_Barred):
    """Work of known length: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, what: str, quiet: bool) -> None:
        self.what, self.quiet = what, quiet
        self.bar = Bar(what) if _draws(quiet) else None
        self.begun = self.said = time.monotonic()

    def say(self, line: str) -> None:
        """A line of what the work is about, for people."""
        if not (self.quiet or log.active):
            console.say(line)

    def at(self, done: int, of: int) -> None:
        now = time.monotonic()
        left = f"about {duration((now - self.begun) / done * (of - done))} left" if 0 < done < of else ""
        if self.bar is not None:
            self.bar.count, self.bar.share, self.bar.left = f"{done}/{of}", done / max(of, 1), left
        elif self.quiet:
            return
        elif log.active:
            log.event("progress", what=self.what, done=done, of=of)
        elif now - self.said >= _OFTEN and done < of:
            self.said = now
            self.say("  ".join(filter(None, (f"{self.what} {done}/{of}", left))))
