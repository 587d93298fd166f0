"""Work that waits for a disk or a device, done by threads of its own while the caller computes."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

R = TypeVar("R")
K = TypeVar("K", bound=Hashable)


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
        return self._threads.submit(self._compute, item)

    def _compute(self, item: K) -> R:
        with torch.no_grad():  # a setting of the thread, not of the process
            return self._function(item)


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
