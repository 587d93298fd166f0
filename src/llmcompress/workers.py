"""Who works on a run: the threads of this process, and its processes (ranks), which may be on several machines.

How work is cut never depends on how many threads or ranks there are, every piece is computed by one thread, and results
come back in the order of the pieces: so the bytes of an output are the same for any number of them. The threads of
torch itself, which may sum in another order when their number changes, are off meanwhile. All ranks make the same calls
in the same order, and all have the results of all.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from threading import get_ident
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


class Communicator(Protocol):
    """What connects the ranks of a run (engine/process/ranks.py). rank: the number of this process, of `size`."""

    rank: int
    size: int

    def all_gather(self, mine: Any) -> Iterator[Any]:
        """What every rank gives, in order of ranks; all of them must read it to the end."""
        ...

    def all_or_raise(self, function: Callable[[], T]) -> T:
        """What `function` gives here; if it raises in any rank, every rank raises."""
        ...


class Part(NamedTuple):
    """One of `of` parts of a sum; each rank adds up a part of its own."""

    number: int
    of: int


WHOLE = Part(0, 1)


class _Pool(NamedTuple):
    """Threads that wait for work, and how many they are."""

    executor: ThreadPoolExecutor
    threads: int


class Workers:
    """The threads and ranks that share the work of a run.

    They serve the thread that made the object. A call from any other thread, such as one that is nested in work of the
    pool, is computed where it is made: so a pool never waits for itself, and ranks exchange in one order.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        """One thread. communicator: of the ranks; None for a single process."""
        self._communicator = communicator
        self._pool: _Pool | None = None
        self._owner = get_ident()

    def _with(self, communicator: Communicator | None, pool: _Pool | None) -> "Workers":
        made = Workers(communicator)
        made._pool = pool
        return made

    @contextmanager
    def with_threads(self, count: int) -> Iterator["Workers"]:
        """The same ranks, and `count` threads as long as the context lasts; meanwhile torch's own threads are off."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        executor = ThreadPoolExecutor(count) if count > 1 else None
        try:
            yield self._with(self._connected, None if executor is None else _Pool(executor, count))
        finally:
            if executor is not None:
                executor.shutdown(cancel_futures=True)
            torch.set_num_threads(before)

    def without_ranks(self) -> "Workers":
        """The same threads, for work that this process does by itself."""
        return self._with(None, self._waiting)

    @property
    def _connected(self) -> Communicator | None:
        return self._communicator if get_ident() == self._owner else None

    @property
    def _waiting(self) -> _Pool | None:
        return self._pool if get_ident() == self._owner else None

    # threads of this process

    @property
    def threads(self) -> int:
        """How many there are."""
        return 1 if self._waiting is None else self._waiting.threads

    def in_order(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """`function` of each item, in order, without gradients; at most `threads` results and one more wait."""
        pool = self._waiting
        if pool is None:
            for item in items:
                yield _without_gradients(function, item)
            return
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.executor.submit(_without_gradients, function, item))
                if len(waiting) > pool.threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
            for future in waiting:
                if not future.cancelled():
                    future.exception()  # nothing of this pass may still run when it is over

    def together(self, functions: Iterable[Callable[[], R]]) -> list[R]:
        """Results of all functions, in order; their work must not depend on one another."""
        pool = self._waiting
        if pool is None:
            with torch.no_grad():
                return [function() for function in functions]
        futures = [pool.executor.submit(_without_gradients, _call, function) for function in functions]
        return [future.result() for future in futures]

    # ranks of the run

    @property
    def rank(self) -> int:
        """The number of this process: 0 leads."""
        return 0 if self._connected is None else self._connected.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return 1 if self._connected is None else self._connected.size

    def part(self, turn: int = 0) -> Part:
        """The part of this rank. turn: the number of the sum, so that not all first parts are one rank's."""
        return Part((self.rank + turn) % self.size, self.size)

    def broadcast(self, function: Callable[[], T]) -> T:
        """What `function` gives in rank 0, where alone it runs; if it raises there, all ranks raise."""
        ranks = self._connected
        if ranks is None:
            return function()
        mine = ranks.all_or_raise(function if ranks.rank == 0 else lambda: None)
        return self.all_gather(mine)[0]  # type: ignore[return-value]

    def all_gather(self, mine: T) -> list[T]:
        """What every rank gives, in order of ranks."""
        return list(self.all_gather_each(mine))

    def all_gather_each(self, mine: T) -> Iterator[T]:
        """As `all_gather`, one at a time; to be read to the end."""
        ranks = self._connected
        return iter([mine]) if ranks is None else ranks.all_gather(mine)

    def all_or_raise(self, function: Callable[[], T]) -> T:
        """What `function` gives here; if it raises in any rank, every rank raises."""
        ranks = self._connected
        return function() if ranks is None else ranks.all_or_raise(function)

    def interleave_ranks(self, own: Iterator[R], count: int, at_once: int = 1) -> Iterator[R]:
        """`count` results in order, of which `own` gives every `size`-th, beginning with that of this rank's number.

        at_once: how many a rank computes before they are exchanged: more exchange less often and take more memory.
        """
        ranks = self._connected
        if ranks is None:
            yield from own
            return
        for _ in range(0, count, at_once * ranks.size):
            parts = list(ranks.all_gather(list(islice(own, at_once))))
            for place in range(at_once):
                yield from (part[place] for part in parts if place < len(part))
        for _ in own:
            raise AssertionError("a rank has more results than its share")

    def map_ranks(self, functions: Sequence[Callable[["Workers"], R]]) -> Iterator[R]:
        """Results one after another; each function is given the workers that it may use.

        Where every rank has a function of its own, these are the threads of its process. With fewer functions than
        ranks, each runs in all ranks, and shares out what is in it to all of them.
        """
        ranks = self._connected
        if ranks is None or len(functions) < ranks.size:
            for function in functions:
                yield function(self)
            return
        alone = self.without_ranks()
        for start in range(0, len(functions), ranks.size):
            own = start + ranks.rank
            mine = functions[own](alone) if own < len(functions) else None
            yield from islice(list(ranks.all_gather(mine)), len(functions) - start)

    # both

    def distribute(self, functions: Iterable[Callable[[], R]]) -> list[R]:
        """As `together`, each function in one thread of one rank. Results are plain data, tensors or codes."""
        ranks = self._connected
        if ranks is None:
            return self.together(functions)
        every = list(functions)
        found = list(ranks.all_gather(self.together(every[ranks.rank :: ranks.size])))
        return [found[number % ranks.size][number // ranks.size] for number in range(len(every))]

    def both(self, first: Callable[[], T], second: Callable[[], R], apart: bool = False) -> tuple[T, R]:
        """Results of two functions whose work does not depend on one another, each computed by one rank.

        apart: a process that computes both begins the second when the first has ended: each of them shares its work
        among threads, and both at once would take more memory.
        """
        pool = self._waiting
        if self._connected is not None:
            functions: list[Callable[[], Any]] = [first, second]
            one, other = self.distribute(functions)
            return one, other
        if pool is None or apart:
            with torch.no_grad():
                return first(), second()
        future = pool.executor.submit(_without_gradients, _call, first)
        with torch.no_grad():
            result = second()
        return future.result(), result


SERIAL = Workers()
"""One thread of one process: for tests, and for work that somebody else has shared out."""


def _call(function: Callable[[], R]) -> R:
    return function()


def _without_gradients(function: Callable[[T], R], item: T) -> R:
    with torch.no_grad():  # a setting of the thread, not of the process
        return function(item)
