"""Work shared out to a fixed set of threads, each of which computes alone.

How work is cut never depends on how many threads there are, every piece is computed by one of them, and results come
back in the order of the pieces: so the bytes of an output are the same for one thread and for many. torch's own
threads, which may sum in another order when their number changes, are off meanwhile.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

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
