"""Work of known length: told step by step, and stopped between two steps."""

from collections.abc import Callable

from llmcompress.errors import StoppedError

Watch = Callable[[int, int], None]
"""Told after every step how many steps are done, and of how many."""


def watched(progress: Watch | None, stop: Callable[[int], bool] | None, kept: str) -> Watch:
    """A `Watch` that tells `progress`, and raises StoppedError when `stop` says so of the number of steps done.

    `stop` is not asked after the last step. kept: what the next start finds, as the hint of the error.
    """

    def watch(done: int, of: int) -> None:
        if progress is not None:
            progress(done, of)
        if done < of and stop is not None and stop(done):
            raise StoppedError(f"stopped at a safe point, {done} of {of} steps done", kept)

    return watch
