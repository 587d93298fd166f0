"""Attempts on the command line as a hostile user would make them, each in a process of its own.

An attempt is a command line and what is laid in its way. `attack` runs many of them, two at a time, in processes that
are forked from one with everything imported (`server.py`), and says of each which promise it broke. What every command
promises:

- The exit code is one of those documented, and no signal ends the process.
- A failure is one error line, perhaps with a hint, and no traceback or panic.
- It ends within a time and a memory that the attempt states.
- The input is as it was before.
- An output is there only if the exit code is 0, and passes `verify`. Beside it, nothing is left over.

A further class of attempts is one file `test_attack_<class>.py`, marked slow, with tests that call `attack`:

    def test_numbers(attack, tiny_model_dir):
        attack("numbers", [Attempt("nan", ["plan", tiny_model_dir, "--bits", "nan"]), ...])
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rounds import ROUNDS

LONG = pytest.mark.skipif(ROUNDS < 2, reason="takes long: set LLMCOMPRESS_ATTACK_ROUNDS to 2 or more")
CODES = frozenset({0, 1, 2, 3})
SECONDS = 60.0  # after which an attempt is killed, and counts as broken
MEMORY = 600_000_000  # bytes that the process may hold beyond what it held at its start
_LONGEST = 6_000  # characters on stderr


@dataclass(frozen=True)
class Attempt:
    """One command line and what is expected of it.

    words: the command line without the program's name; the command runs in a folder of its own. prepare: called with
    that folder before the command. source: a directory that must be the same afterwards. output: what the command
    writes. Both are paths from the folder. left: names in the folder that may be there afterwards. codes: exit codes
    that are an orderly end. seconds, memory: the bounds. closed: descriptors that are closed for the command (1 is its
    stdout). limits: of resources, such as {"RLIMIT_FSIZE": 1000}. environment: variables on top of those of the tests.
    verifies: whether `verify` (with the source, where there is one) must pass after exit code 0.
    """

    name: str
    words: Sequence[object]
    prepare: Callable[[Path], object] | None = None
    source: str | Path | None = None
    output: str | None = None
    left: Sequence[str] = ()
    codes: frozenset[int] = CODES
    seconds: float = SECONDS
    memory: int = MEMORY
    closed: Sequence[int] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    verifies: bool = True


@dataclass(frozen=True)
class Ended:
    """How a command ended. code: None if it was killed for its time, negative for a signal. seconds: wall clock.

    grown: bytes of the largest resident set beyond that at the start. verified: the exit code of `verify`.
    """

    code: int | None
    out: str
    err: str
    seconds: float
    grown: int = 0
    verified: int = 0


@dataclass
class Tally:
    """Attempts and broken promises by class."""

    attempts: dict[str, int] = field(default_factory=dict)
    broken: dict[str, list[str]] = field(default_factory=dict)


class Servers:
    """Processes that run attempts, one for each that is made at a time."""

    def __init__(self, count: int = 2) -> None:
        command = [sys.executable, str(Path(__file__).with_name("server.py"))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.free = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
            for _ in range(count)
        ]
        self.count = count

    def close(self) -> None:
        """End the processes."""
        for server in self.free:
            assert server.stdin is not None
            server.stdin.close()
            server.wait(30)

    def run(self, attempt: Attempt, place: Path) -> Ended:
        """Run the command of an attempt in the folder `place`."""
        logs = place.with_name(f"{place.name}.logs")
        logs.mkdir()
        verify = []
        if attempt.output is not None and attempt.verifies:
            source = [] if attempt.source is None else ["--source", str(place / attempt.source)]
            verify = [str(place / attempt.output), *source]
        request = {
            "words": [str(word) for word in attempt.words],
            "folder": str(place),
            "logs": str(logs),
            "verify": verify,
            "seconds": attempt.seconds,
            "closed": list(attempt.closed),
            "limits": dict(attempt.limits),
            "environment": dict(attempt.environment),
        }
        server = self.free.pop()
        try:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            answer = json.loads(server.stdout.readline())
        finally:
            self.free.append(server)
        said = {
            name: (logs / name).read_text(encoding="utf-8", errors="replace") if (logs / name).exists() else ""
            for name in ("out", "err")
        }
        shutil.rmtree(logs)
        return Ended(**said, **answer)


def attack(kind: str, attempts: Sequence[Attempt], *, folder: Path, tally: Tally, servers: Servers) -> None:
    """Make all attempts of one class; AssertionError naming every attempt that broke a promise."""
    names = [attempt.name for attempt in attempts]
    assert len(set(names)) == len(names), "two attempts have one name"
    preparing = threading.Lock()

    def one(numbered: tuple[int, Attempt]) -> list[str]:
        number, attempt = numbered
        place = folder / f"{kind} {number}"
        with preparing:
            place.mkdir(parents=True)
            if attempt.prepare is not None:
                attempt.prepare(place)
            before = _listing(place, attempt)
        wrongs = broken_promises(attempt, servers.run(attempt, place), place, before)
        shutil.rmtree(place, ignore_errors=True)
        return [f"{attempt.name}: {wrong}" for wrong in wrongs]

    with ThreadPoolExecutor(servers.count) as pool:
        found = [wrong for wrongs in pool.map(one, enumerate(attempts)) for wrong in wrongs]
    tally.attempts[kind] = tally.attempts.get(kind, 0) + len(attempts)
    tally.broken.setdefault(kind, []).extend(found)
    assert not found, f"{len(found)} of {len(attempts)}:\n" + "\n".join(found)


Listing = dict[str, tuple[int, int, int]]


def _listing(place: Path, attempt: Attempt) -> dict[str, Listing]:
    """Every file by path, with what changes when it is written: those beside the output, and those of the source."""
    found = {"folder": dict.fromkeys(os.listdir(place), (0, 0, 0))}  # noqa: PTH208
    if attempt.source is not None:
        source = place / attempt.source
        found["source"] = {
            str(file.relative_to(source)): (stat.st_size, stat.st_mtime_ns, stat.st_mode)
            for file in sorted(source.rglob("*"))
            for stat in (file.lstat(),)
        }
    return found


def broken_promises(attempt: Attempt, ended: Ended, place: Path, before: dict[str, Listing]) -> list[str]:
    """What a command did that it should not have done, in words."""
    said = " | ".join(ended.err.strip().splitlines()[-3:])[-400:]
    if ended.code is None:
        return [f"took longer than {attempt.seconds:.0f} s: {said}"]
    wrongs = []
    if ended.code not in attempt.codes:
        wrongs.append(f"exit code {ended.code}: {said}")
    if "Traceback (most recent call last)" in ended.err or "panicked at" in ended.err:
        wrongs.append(f"a traceback: {said}")
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    if ended.code in (1, 2) and len(errors) != 1 and 2 not in attempt.closed:
        wrongs.append(f"{len(errors)} error lines with exit code {ended.code}: {said}")
    if len(ended.err) > _LONGEST:
        wrongs.append(f"{len(ended.err)} characters on stderr")
    if ended.grown > attempt.memory:
        wrongs.append(f"{ended.grown / 1e6:.0f} MB of memory")
    after = _listing(place, attempt)
    if after.get("source") != before.get("source"):
        wrongs.append("the source was changed")
    allowed = {*attempt.left, *([attempt.output] if attempt.output and ended.code == 0 else [])}
    if left := sorted(after["folder"].keys() - before["folder"].keys() - allowed):
        wrongs.append(f"left behind: {', '.join(left)} (exit code {ended.code})")
    if ended.code == 0 and attempt.output is not None and not os.path.lexists(place / attempt.output):
        wrongs.append("no output in spite of exit code 0")
    if ended.verified:
        wrongs.append(f"verify of the output ends with {ended.verified}: {' | '.join(ended.out.splitlines()[-3:])}")
    return wrongs
