"""Work on what a stranger wrote, such as a tokenizer or a template, in a process of its own with limits.

A tokenizer is a program in all but name, and so is a chat template: it can take hours, or all memory, or end the whole
process from within a library. So such work is done in a forked process, whose processor time and memory are bounded;
whatever becomes of it, this process goes on and says in one line what happened. What comes back are bytes.
"""

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from llmcompress import errors
from llmcompress.errors import LlmcompressError

_SECONDS = 4.0  # of processor time for a piece of work of no size
_SECONDS_A_BYTE = 2e-5
_MEMORY = 500_000_000  # bytes, beyond what the process held before
_MEMORY_A_BYTE = 500  # a token takes some hundred bytes, and may be a single character
_FRAME = struct.Struct("<cQ")
_DATA, _ERROR, _END = b"D", b"E", b"."

Limit = Callable[[int], None]
"""limit(size): bounds what comes next, until it is called again. size: of what is worked on, in bytes."""
Failed = Callable[[str], LlmcompressError]
"""The error for work that failed, by the reason."""


def isolated(work: Callable[[Limit], Iterable[bytes]], failed: Failed) -> Iterator[bytes]:
    """What `work` yields in a forked process; its LlmcompressErrors as they are, `failed(reason)` for any other end."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _serve(work, failed, writer)
    os.close(writer)
    ended = False
    try:
        with os.fdopen(reader, "rb") as frames:
            while not ended:
                kind, data = _read(frames)
                if kind == _DATA:
                    yield data
                elif kind == _ERROR:
                    name, message, hint = json.loads(data)
                    raise getattr(errors, name, errors.CheckpointError)(message, hint)
                else:
                    ended = True
                    finished = kind == _END
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if not finished:
        raise failed(_reason(status))


def probe(work: Callable[[], object], failed: Failed, size: int = 0) -> None:
    """Do `work` on something of `size` bytes in a forked process, only to see that it can be done here."""

    def once(limit: Limit) -> Iterator[bytes]:
        limit(size)
        work()
        yield b""

    for _ in isolated(once, failed):
        pass


def _read(frames: BinaryIO) -> tuple[bytes, bytes]:
    head = frames.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return b"", b""
    kind, size = _FRAME.unpack(head)
    data = frames.read(size)
    return (kind, data) if len(data) == size else (b"", b"")


def _reason(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGPROF:
            return "it takes too long"
        # libraries that get no more memory abort
        return "it takes too much memory" if number in (signal.SIGABRT, signal.SIGKILL) else f"signal {number} ended it"
    return "it ended the process"


def _serve(work: Callable[[Limit], Iterable[bytes]], failed: Failed, writer: int) -> NoReturn:
    """Do the work in the forked process, and end the process whatever happens."""
    try:
        for number in (signal.SIGPROF, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in (1, 2):  # panics print to stderr whatever becomes of them
            os.dup2(silent, descriptor)
        os.closerange(3, writer)  # with the locks of this process, which end with the last descriptor
        os.closerange(writer + 1, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)  # threads do not outlive a fork
        with os.fdopen(writer, "wb") as out:
            _send(out, work, failed)
    finally:
        os._exit(0)


def _send(out: BinaryIO, work: Callable[[Limit], Iterable[bytes]], failed: Failed) -> None:
    limit = _limits()
    try:
        limit(0)
        for data in work(limit):
            out.write(_FRAME.pack(_DATA, len(data)) + data)
            out.flush()
        out.write(_FRAME.pack(_END, 0))
    except LlmcompressError as error:
        _send_error(out, error)
    except MemoryError:
        _send_error(out, failed("it takes too much memory"))
    except BaseException as error:  # also a panic, which is no Exception
        line = next(iter(str(error).strip().splitlines()), "")
        memory = "can't allocate memory" in line or "Unable to allocate" in line
        _send_error(out, failed("it takes too much memory" if memory else line or type(error).__name__))


def _send_error(out: BinaryIO, error: LlmcompressError) -> None:
    data = json.dumps([type(error).__name__, error.message, error.hint]).encode()
    out.write(_FRAME.pack(_ERROR, len(data)) + data)


def _limits() -> Limit:
    """Bounds processor time and memory of this process from now on."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        held = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        held = None  # no Linux: time alone is bounded

    def limit(size: int) -> None:
        signal.setitimer(signal.ITIMER_PROF, _SECONDS + size * _SECONDS_A_BYTE)
        if held is not None:
            most = held + _MEMORY + size * _MEMORY_A_BYTE
            resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))

    return limit
