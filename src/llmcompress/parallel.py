"""Work shared out to a fixed set of threads, each of which computes alone.

How work is cut never depends on how many threads there are, every piece is computed by one of them, and results come
back in the order of the pieces: so the bytes of an output are the same for one thread and for many. torch's own
threads, which may sum in another order when their number changes, are off meanwhile.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K", bound=Hashable)

# a thread of the pool has a context of its own, in which there is no pool: what is nested runs in place
_pool: ContextVar[tuple[ThreadPoolExecutor, int] | None] = ContextVar("pool", default=None)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within, `in_order` and `together` use `count` threads; with one, everything happens in the caller's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    executor = ThreadPoolExecutor(count) if count > 1 else None
    token = _pool.set((executor, count) if executor is not None else None)
    try:
        yield
    finally:
        _pool.reset(token)
        if executor is not None:
            executor.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def in_order(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """`function` of each item, in order, without gradients; at most one result more than there are threads waits."""
    pool = _pool.get()
    if pool is None:
        for item in items:
            yield _without_gradients(function, item)
        return
    executor, count = pool
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(executor.submit(_without_gradients, function, item))
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for future in waiting:
            if not future.cancelled():
                future.exception()  # nothing of this pass may still run when it is over


def together(functions: Iterable[Callable[[], R]]) -> list[R]:
    """Results of all functions, in order; their work must not depend on one another."""
    pool = _pool.get()
    if pool is None:
        with torch.no_grad():
            return [function() for function in functions]
    futures = [pool[0].submit(_without_gradients, _call, function) for function in functions]
    return [future.result() for future in futures]


def both(first: Callable[[], T], second: Callable[[], R]) -> tuple[T, R]:
    """Results of two functions whose work does not depend on one another."""
    pool = _pool.get()
    if pool is None:
        with torch.no_grad():
            return first(), second()
    future = pool[0].submit(_without_gradients, _call, first)
    with torch.no_grad():
        other = second()
    return future.result(), other


def _call(function: Callable[[], R]) -> R:
    return function()


def _without_gradients(function: Callable[[T], R], item: T) -> R:
    with torch.no_grad():  # a setting of the thread, not of the process
        return function(item)


class Ahead(Generic[K, R]):
    """Results of a function that waits for a disk or a device, computed by other threads before they are asked for.

    Items are taken in the order of `items`, any number of times from the first on.
    """

    def __init__(self, function: Callable[[K], R], items: Sequence[K], most: int) -> None:
        """most: items that are computed ahead of the one that was taken last."""
        self._function = function
        self._next = {item: items[place + 1 : place + 1 + most] for place, item in enumerate(items)}
        self._ready: dict[K, Future[R]] = {}
        self._threads = ThreadPoolExecutor(max(1, most))

    def take(self, item: K) -> R:
        """The result for an item; whatever the function raises."""
        result = self._ready.pop(item, None) or self._submit(item)
        for later in self._next[item]:
            if later not in self._ready:
                self._ready[later] = self._submit(later)
        return result.result()

    def _submit(self, item: K) -> Future[R]:
        return self._threads.submit(_without_gradients, self._function, item)


class Behind:
    """Functions that wait for a disk or a device, carried out one after another in a thread of their own."""

    def __init__(self, most: int) -> None:
        """most: functions that may wait; a further one waits for the first of them."""
        self._most, self._thread = most, ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()

    def add(self, function: Callable[[], None]) -> None:
        """Carry a function out after those before it; raises what one of them has raised."""
        while len(self._waiting) >= self._most:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(function))

    def finish(self) -> None:
        """Wait until everything is done; raises what a function has raised."""
        try:
            while self._waiting:
                self._waiting.popleft().result()
        finally:
            self._thread.shutdown(cancel_futures=True)
