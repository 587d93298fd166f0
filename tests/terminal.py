"""A real terminal, of tmux, that a command of ours is run in: what is on its screen meanwhile and in the end."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

_SECONDS = 120.0
_ENVIRONMENT = ("PATH", "PYTHONPATH", "HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "COVERAGE_PROCESS_START")
CLI = (sys.executable, "-m", "llmcompress")


class Terminal:
    """A command in a terminal of `width` columns and 40 lines, on a server of tmux of its own.

    It begins with `begin`, once all that it prints is kept in `raw`.
    """

    def __init__(
        self,
        folder: Path,
        width: int,
        words: Sequence[object],
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = CLI,
    ) -> None:
        self._place = TemporaryDirectory(prefix="tmux-", dir="/tmp")  # a socket's path has 107 bytes at most
        self.socket, self.raw, self._code = Path(self._place.name, "socket"), folder / "raw", folder / "code"
        kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        variables = {**kept, "TERM": "screen-256color", "LC_ALL": "C.UTF-8", **(environment or {})}
        command = shlex.join(["env", "-i", *(f"{n}={v}" for n, v in variables.items()), *program, *map(str, words)])
        waits = f"tmux -S {self.socket} wait-for begin"
        script = f"{waits}; {command}; echo $? > {self._code}.part; mv {self._code}.part {self._code}; exec sleep 1000"
        size = ("-x", str(width), "-y", "40")
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "-c", str(folder), f"sh -c {shlex.quote(script)}")
        self._tmux("pipe-pane", f"cat > {self.raw}")

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self._tmux("kill-server")
        self._place.cleanup()

    def begin(self) -> None:
        self._tmux("wait-for", "-S", "begin")

    def frames(self) -> Iterator[list[str]]:
        """The lines of the screen, again and again until the command has ended; AssertionError if it does not."""
        end = time.monotonic() + _SECONDS
        while not self._code.exists():
            assert time.monotonic() < end, self.lines()
            yield self.lines()
            time.sleep(0.03)

    def finish(self) -> list[list[str]]:
        """All frames of a command that is begun here."""
        self.begin()
        return list(self.frames())

    @property
    def code(self) -> int:
        return int(self._code.read_text())

    def lines(self, joined: bool = False) -> list[str]:
        """What the screen shows, without empty lines. joined: what the terminal broke for its width is one line."""
        shown = self._tmux("capture-pane", "-p", "-S", "-", *(["-J"] if joined else []))
        return [line.rstrip() for line in shown.splitlines() if line.strip()]

    def _tmux(self, *words: str) -> str:
        environment = {**{n: v for n, v in os.environ.items() if n != "TMUX"}, "TERM": "xterm-256color"}
        done = subprocess.run(
            ["tmux", "-u", "-S", str(self.socket), *words], capture_output=True, text=True, check=True, env=environment
        )
        return done.stdout
