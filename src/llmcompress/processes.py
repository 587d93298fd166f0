"""Work shared out to the processes of a run, which may be on several machines; with one, everything happens in it.

As with threads (parallel.py), how work is cut never depends on how many processes there are, every piece is computed by
one of them, and results come back in the order of the pieces: so the bytes of an output do not depend on it. Every
process takes every call in the same order, and has the results of all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

from llmcompress import parallel

T = TypeVar("T")
R = TypeVar("R")


class Team(Protocol):
    """The processes of a run (engine/process/ranks.py). rank: the number of this one, of `size`."""

    rank: int
    size: int

    def exchange(self, mine: Any) -> Iterator[Any]:
        """What every process gives, in order of ranks; to be read to the end by all of them."""
        ...

    def agreed(self, function: Callable[[], T]) -> T:
        """What a function gives here; if it raises in any process, every process raises."""
        ...


class Part(NamedTuple):
    """One of `of` parts of a sum of which each process adds up its own."""

    number: int
    of: int


WHOLE = Part(0, 1)

# a thread of the pool has a context of its own, in which there is no team: what is nested runs in place
_team: ContextVar[Team | None] = ContextVar("team", default=None)


@contextmanager
def member_of(team: Team | None) -> Iterator[None]:
    """Within, work is shared out to `team`; None: done here."""
    token = _team.set(team)
    try:
        yield
    finally:
        _team.reset(token)


def alone() -> bool:
    """Whether there is one process."""
    return _team.get() is None


def rank() -> int:
    """The number of this process: 0 leads."""
    team = _team.get()
    return 0 if team is None else team.rank


def processes() -> int:
    """How many there are."""
    team = _team.get()
    return 1 if team is None else team.size


def part(turn: int = 0) -> Part:
    """The part of this process. turn: a number of the sum, so that first parts of many are not all one process's."""
    team = _team.get()
    return WHOLE if team is None else Part((team.rank + turn) % team.size, team.size)


def shared(functions: Iterable[Callable[[], R]]) -> list[R]:
    """As `parallel.together`, each function in one process. Results are plain data, tensors or codes."""
    team = _team.get()
    if team is None:
        return parallel.together(functions)
    every = list(functions)
    found = list(team.exchange(parallel.together(every[team.rank :: team.size])))
    return [found[number % team.size][number // team.size] for number in range(len(every))]


def both(first: Callable[[], T], second: Callable[[], R]) -> tuple[T, R]:
    """As `parallel.both`, each in one process."""
    if alone():
        return parallel.both(first, second)
    functions: list[Callable[[], Any]] = [first, second]
    one, other = shared(functions)
    return one, other


def spread(functions: Sequence[Callable[[], R]]) -> Iterator[R]:
    """Results one after another; where every process has a function of its own, what that shares out stays there.

    With fewer functions than processes, each runs in all of them, that they may share out what is in it.
    """
    team = _team.get()
    if team is None or len(functions) < team.size:
        for function in functions:
            yield function()
        return
    for start in range(0, len(functions), team.size):
        mine = None
        if start + team.rank < len(functions):
            with member_of(None):
                mine = functions[start + team.rank]()
        yield from islice(list(team.exchange(mine)), len(functions) - start)


def from_all(own: Iterator[R], count: int, at_once: int = 1) -> Iterator[R]:
    """`count` results in order, of which `own` gives every n-th, from that of this process on.

    at_once: how many a process computes before they are exchanged: fewer exchanges, and more in memory.
    """
    team = _team.get()
    if team is None:
        yield from own
        return
    for _ in range(0, count, at_once * team.size):
        parts = list(team.exchange(list(islice(own, at_once))))
        for place in range(at_once):
            yield from (part[place] for part in parts if place < len(part))
    for _ in own:
        raise AssertionError("a process has more results than its share")


def each(mine: T) -> Iterator[T]:
    """What every process gives, in order, one at a time; to be read to the end."""
    team = _team.get()
    return iter([mine]) if team is None else team.exchange(mine)


def gathered(mine: T) -> list[T]:
    """What every process gives, in order."""
    return list(each(mine))


def first(function: Callable[[], T]) -> T:
    """What a function gives in the first process, where alone it runs; if it raises there, all raise."""
    team = _team.get()
    if team is None:
        return function()
    mine = team.agreed(function if team.rank == 0 else lambda: None)
    return gathered(mine)[0]  # type: ignore[return-value]


def agreed(function: Callable[[], T]) -> T:
    """What a function gives here, or an error in every process if it raises in one."""
    team = _team.get()
    return function() if team is None else team.agreed(function)
