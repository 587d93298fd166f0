"""The batch that a thread is running through a layer, and how hooks end its forward early."""

import threading
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor


@dataclass
class Batch:
    """What hooks have noted of one batch. span: its windows.

    seen: by space, the input of the matrix that reads the space, or a summary of that input. returned: by space, what a
    bypassed module returned.
    """

    span: slice
    seen: dict[str, Any] = field(default_factory=dict)
    returned: dict[str, Tensor] = field(default_factory=dict)


class CurrentBatch(threading.local):
    """The batch of each thread: all threads run the same modules with the same hooks. A hook asks for it here."""

    batch: Batch

    def begin(self, span: slice) -> Batch:
        """Make a batch the one that this thread runs from now on."""
        self.batch = Batch(span)
        return self.batch


def until_stopped() -> AbstractContextManager[None]:
    """Within, a layer runs until it ends or a hook calls `stop_forward`.

    No generator as `contextmanager` makes them: from Python 3.12 on, the exception and the frames that it has passed,
    with the tensors they hold, would stay until Python looks for circles.
    """
    return suppress(_Stopped)


def stop_forward() -> NoReturn:
    """End the forward of a layer from a hook inside it; torch offers no other way out than an exception."""
    raise _Stopped


class _Stopped(Exception):  # noqa: N818 (control flow, not an error)
    """Everything that was wanted of a batch has been seen; the rest of the layer need not run."""
