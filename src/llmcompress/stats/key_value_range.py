"""How large keys and values become: the largest magnitude of every channel of every head, over all tokens."""

import threading

import torch
from torch import Tensor


class KeyValueRange:
    """The largest magnitudes of keys and of values, [kv heads, dim] float32 each; None before the first `update`.

    Several threads may update at once, since the order of maxima does not matter.
    """

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self._lock = threading.Lock()

    def update(self, key: Tensor, value: Tensor) -> None:
        """Add keys and values [batch, kv heads, length, dim] as they enter the cache."""
        self.include(*(x.detach().abs().amax(dim=(0, 2)).to(torch.float32) for x in (key, value)))

    def include(self, key: Tensor, value: Tensor) -> None:
        """Add magnitudes [kv heads, dim] that others have seen."""
        with self._lock:
            self.key = key if self.key is None else torch.maximum(self.key, key)
            self.value = value if self.value is None else torch.maximum(self.value, value)
