"""When a command is to stop at its next safe point."""

import signal
import time
from types import FrameType


class Stop:
    """True once SIGTERM has come, or once the deadline is over and this start has finished something.

    So every start gets further than the one before. The clock of the deadline begins with the object. before: how much
    this start finished in runs before the one that asks.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline, self.before = deadline, 0
        self._clock_start, self._terminated = time.monotonic(), False
        signal.signal(signal.SIGTERM, self._on_term)

    def __call__(self, finished: int) -> bool:
        late = self.deadline is not None and time.monotonic() - self._clock_start >= self.deadline
        return self._terminated or (late and self.before + finished > 0)

    def _on_term(self, _: int, __: FrameType | None) -> None:
        self._terminated = True
