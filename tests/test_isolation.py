"""Work in a process of its own: what comes back, what becomes of what fails, and that nothing outlives it."""

import fcntl
import os
import time

import pytest

from llmcompress import isolation
from llmcompress.errors import CalibrationError, CheckpointError
from llmcompress.isolation import isolated, probe


def failed(reason):
    return CheckpointError(f"no good: {reason}")


def refused(work, match):
    begin = time.process_time()
    with pytest.raises(CheckpointError, match=match):
        probe(work, failed)
    assert time.process_time() - begin < 2


def test_what_is_yielded_comes_back_in_order():
    pieces = [b"", b"a", os.urandom(3_000_000), b"\0"]
    assert list(isolated(lambda limit: iter(pieces), failed)) == pieces


def test_an_error_of_ours_comes_back_as_it_is():
    def work(limit):
        yield b"before"
        raise CalibrationError("no text here", "give some")

    found = isolated(work, failed)
    assert next(found) == b"before"
    with pytest.raises(CalibrationError) as caught:
        next(found)
    assert (caught.value.message, caught.value.hint) == ("no text here", "give some")


class PanicError(BaseException):
    pass


def loop():
    while True:
        pass


def raises(error):
    def work():
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "match"),
    [
        (raises(ValueError("bad\nvalue")), "no good: bad$"),
        (raises(PanicError("index out of bounds")), "no good: index out of bounds"),
        (raises(KeyError()), "no good: KeyError"),
        (raises(SystemExit(0)), "no good: 0"),
        (raises(KeyboardInterrupt()), "no good: KeyboardInterrupt"),
        (lambda: bytes(1 << 40), "too much memory"),
        (lambda: b"a" * (1 << 31), "too much memory"),
        (lambda: list(range(1 << 32)), "too much memory"),
        (os.abort, "too much memory"),
        (lambda: os._exit(0), "ended the process"),
        (lambda: os._exit(7), "ended the process"),
        (lambda: os.kill(os.getpid(), 11), "signal 11"),
    ],
)
def test_whatever_becomes_of_it_is_one_line(work, match):
    refused(work, match)


def test_time_is_bounded(monkeypatch):
    monkeypatch.setattr(isolation, "_SECONDS", 0.2)
    refused(loop, "too long")
    refused(lambda: 7 ** (10**9), "too long")  # within one call of a library
    probe(lambda: sum(range(10**7)), failed, size=1_000_000)  # what is larger may take longer


def test_what_it_prints_is_not_heard(capfd):
    probe(lambda: (os.write(1, b"out"), os.write(2, b"err")), failed)
    assert capfd.readouterr() == ("", "")


def test_nothing_outlives_what_is_not_read_to_its_end():
    def work(limit):
        while True:
            yield os.getpid().to_bytes(8, "little")

    found = isolated(work, failed)
    child = int.from_bytes(next(found), "little")
    found.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_it_holds_no_lock_of_this_process(tmp_path):
    def locked():
        descriptor = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor

    def work(limit):
        yield b""
        time.sleep(60)

    first = locked()
    found = isolated(work, failed)
    next(found)
    os.close(first)
    os.close(locked())
    found.close()


def test_it_does_not_change_the_limits_here():
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    probe(lambda: None, failed)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
