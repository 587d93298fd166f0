"""What stands outside of a model's layers, for several threads at once."""

import threading
from copy import deepcopy
from typing import Any

from torch import nn


class PerThread:
    """Copies of what stands outside of the layers for each thread, since running it leaves traces there."""

    def __init__(self, *sections: nn.Module) -> None:
        self._sections, self._local = sections, threading.local()

    def get(self) -> tuple[nn.Module, ...]:
        if not hasattr(self._local, "copies"):
            self._local.copies = tuple(map(_sharing, self._sections))
        return self._local.copies  # type: ignore[no-any-return]


def _sharing(section: nn.Module) -> nn.Module:
    """A copy of a section on the same weights."""
    alike: dict[int, Any] = {id(weight): weight for weight in section.parameters()}
    return deepcopy(section, alike)
