"""Ways to damage a document, and what is asked of a reader that meets a damaged one.

Documents are mutated as trees of JSON text: a node may become any token, also ones that no writer would produce
(`1e999`, a key given twice, half a surrogate pair, nesting without end). Whole files are mutated as bytes. Which of
this happens where is read from a few random bytes, which hypothesis draws, and shrinks, at little cost.
"""

import json
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmcompress.errors import LlmcompressError

# How much a reader may allocate: four times the file, as for text and its parsed form, and on top what it needs for
# any file at all (a message, a parser, interned names). Inputs here have at most some 100 kB, so that a length taken
# from a file and believed would show at once; files of megabytes are in test_bombs.py.
FACTOR, ALLOWANCE = 4, 1 << 20
YAML = 256  # the factor for YAML, of which two characters may be a node
SECONDS = 2.0  # of processor time for one input
HANG = 60  # seconds after which an input is given up
BATCH = 20  # inputs drawn at once: what hypothesis does around an example takes longer than reading one

# the same inputs every time; many more in the slow suite
INPUTS = pytest.mark.parametrize("inputs", [200, pytest.param(2_000, marks=pytest.mark.slow)])
FEWER_INPUTS = pytest.mark.parametrize("inputs", [60, pytest.param(250, marks=pytest.mark.slow)])  # 50 ms each and more


def fuzz(inputs: int, check: Callable[["Dice"], None]) -> None:
    """Call `check` with the dice of at least `inputs` different inputs."""
    seen = 0

    @settings(
        max_examples=-(-inputs // BATCH),
        derandomize=True,
        deadline=None,  # `measured` counts processor time: these machines are shared
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.binary(min_size=1, max_size=24), min_size=BATCH, max_size=BATCH))
    def run(batch: list[bytes]) -> None:
        nonlocal seen
        seen += len(batch)
        for rolls in batch:
            check(Dice(rolls))

    run()
    assert seen >= inputs


class Dice:
    """Choices, read from bytes; zeros when those are used up."""

    def __init__(self, rolls: bytes) -> None:
        self._rolls = rolls

    def __bool__(self) -> bool:
        return bool(self._rolls)

    def below(self, limit: int) -> int:
        """A number from 0 to limit - 1."""
        count = 1 if limit <= 256 else 3
        taken, self._rolls = self._rolls[:count], self._rolls[count:]
        return int.from_bytes(taken, "little") % limit

    def choose(self, items: Sequence[Any]) -> Any:
        return items[self.below(len(items))]

    def some_bytes(self) -> bytes:
        count = self.below(4) + 1
        taken, self._rolls = self._rolls[:count], self._rolls[count:]
        return taken


@contextmanager
def tracing() -> Iterator[None]:
    """Within, allocations are counted and an input that hangs is interrupted."""

    def give_up(*_: Any) -> None:
        raise AssertionError(f"no answer within {HANG} s")

    before = signal.signal(signal.SIGALRM, give_up)
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def measured(
    read: Callable[[], Any], size: int, refusal: type[Exception] = LlmcompressError, factor: int = FACTOR
) -> Any:
    """What `read` gives, None if it refuses: in one printable line, in time, without allocating beyond measure."""
    most = factor * size + ALLOWANCE
    result, spent, peak = _measured_once(read, refusal)
    if spent >= SECONDS or peak > most:
        # once more: what a first time imports is not owed to the input
        result, spent, peak = _measured_once(read, refusal)
    assert spent < SECONDS, f"{spent:.1f} s"
    assert peak <= most, f"{peak} bytes for a file of {size}"
    return result


def _measured_once(read: Callable[[], Any], refusal: type[Exception]) -> tuple[Any, float, int]:
    signal.alarm(HANG)
    tracemalloc.reset_peak()
    held, begin = tracemalloc.get_traced_memory()[0], time.process_time()
    result = None
    try:
        result = read()
    except refusal as error:
        message = error.message if isinstance(error, LlmcompressError) else ""
    else:
        message = ""
    assert message.isprintable(), message
    return result, time.process_time() - begin, tracemalloc.get_traced_memory()[1] - held


# -- trees of JSON text ---------------------------------------------------------------------------------------------

Tree = Any  # text of a scalar, a list of trees, or a list of [key text, tree] in a tuple

SCALARS = [
    "null", "true", "false", "0", "1", "-1", "2", "3", "7", "64", "1.0", "1.5", "-0.0", "1e2", "1e999", "-1e999",
    "NaN", "Infinity", "-Infinity", str(2**31), str(2**32), str(2**63), str(2**64), str(-(2**63)), str(10**30),
    str(10**400), "9" * 5000, '""', '"x"', '"0"', '"4"', '"\\ud800"', '"\\u0000"', '"\\u001b[2J"', '"a\\nb"',
    '"\\ud83d\\ude00"', '"é漢😀"', '"' + "x" * 20_000 + '"', "[]", "{}", "[0]", "[-1]", "[[]]", '{"x": 1}', '[""]',
    "{}}", '"', "", "0x10", "01", "truth", "'x'", "[" + "0," * 2000 + "0]", "[" * 300 + "]" * 300,
    "[" * 900 + "]" * 900, "[" * 50_000, '{"a":' * 300 + "1" + "}" * 300, '{"a":' * 20_000,
]  # fmt: skip
_KINDS = ["replace", "add", "rename", "remove", "repeat", "wrap", "replace", "replace", "add"]


def tree(value: Any) -> Tree:
    if isinstance(value, dict):
        return ([[json.dumps(key), tree(item)] for key, item in value.items()],)
    if isinstance(value, list):
        return [tree(item) for item in value]
    return json.dumps(value)


def text(node: Tree) -> str:
    if isinstance(node, tuple):
        return "{" + ",".join(f"{key}:{text(item)}" for key, item in node[0]) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(text, node)) + "]"
    return str(node)


def _places(node: Tree) -> Iterator[tuple[Any, int, Any]]:
    """Of every node below `node`: the list that holds it and its index there, and the list of its siblings."""
    children = node[0] if isinstance(node, tuple) else node if isinstance(node, list) else []
    for index, child in enumerate(children):
        if isinstance(node, tuple):
            yield child, 1, children
            yield from _places(child[1])
        else:
            yield children, index, children
            yield from _places(child)


def mutated(value: Any, dice: Dice, keys: Sequence[str], scalars: Sequence[str] = SCALARS) -> str:
    """The JSON text of a value after up to four changes; `keys` are names worth giving to a node."""
    node, names = tree(value), [*map(json.dumps, keys), '"\\ud800"', '""', "1", "{}"]
    for _ in range(4):
        places = list(_places(node))
        if not dice or not places:
            break
        kind, (container, index, siblings) = dice.choose(_KINDS), dice.choose(places)
        keyed = container is not siblings
        token = dice.choose(scalars) if dice.below(8) else json.dumps(dice.some_bytes().decode("utf-16-le", "ignore"))
        if kind == "replace":
            container[index] = token
        elif kind == "wrap":
            container[index] = [container[index]]
        elif kind == "rename" and keyed:
            container[0] = dice.choose(names)
        elif kind == "add":
            siblings.insert(dice.below(len(siblings) + 1), [dice.choose(names), token] if keyed else token)
        elif kind == "remove":
            del siblings[dice.below(len(siblings))]
        elif kind == "repeat":
            siblings.append(dice.choose(siblings))
    return text(node)


# -- bytes ----------------------------------------------------------------------------------------------------------

_PIECES = [
    b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"{", b"}", b"[", b"]", b'"', b",", b"\\", b"\n", b"\r", b"9",
    b"-", b"e", b":", b"\\u", b"\\ud800", b"[" * 5000, b"9" * 5000, b"&a ", b"*a", b"!!int ", b"\t", b"#", b"|", b"- ",
]  # fmt: skip


def damaged(data: bytes, dice: Dice) -> bytes:
    """Bytes after up to four changes."""
    out = bytearray(data)
    for _ in range(4):
        if not dice or not out:
            break
        kind, at = dice.below(8), dice.below(len(out))
        piece = dice.choose(_PIECES) if dice.below(4) else dice.some_bytes()
        if kind < 3:
            out[at] ^= 1 << dice.below(8)
        elif kind == 3:
            out[at : at + len(piece)] = piece
        elif kind == 4:
            out[at:at] = piece
        elif kind == 5:
            del out[at : at + dice.below(1 << 10)]
        elif kind == 6:
            out[at:at] = out[at : at + dice.below(1 << 10)]
        else:
            del out[at:]
    return bytes(out)


def spoilt(value: Any, dice: Dice, keys: Sequence[str], scalars: Sequence[str] = SCALARS) -> bytes:
    """The JSON text of a value after changes to its tree or to its bytes."""
    if dice.below(2):
        return damaged(json.dumps(value).encode(), dice)
    return mutated(value, dice, keys, scalars).encode("utf-8", "surrogatepass")
