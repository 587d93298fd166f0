"""Memory that blocks of a kernel share while it runs."""

import torch
from torch import Tensor


class Workspace:
    """Counters that kernels find and leave at zero, and room for partial sums, on one device and for one stream.

    Both grow when more is asked for than ever before, and stay where they are otherwise. What they were before stays
    allocated, since CUDA graphs that were captured then still use it.
    """

    def __init__(self, device: torch.device) -> None:
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)
        self._partial = torch.empty(0, dtype=torch.int32, device=device)
        self._outgrown: list[Tensor] = []

    def counters(self, count: int) -> Tensor:
        """Zeros int32 [count or more]."""
        if self._counters.numel() < count:
            self._outgrown.append(self._counters)
            self._counters = torch.zeros(count, dtype=torch.int32, device=self._counters.device)
        return self._counters

    def partial(self, count: int) -> Tensor:
        """Numbers of 32 bits [count or more] of any value."""
        if self._partial.numel() < count:
            self._outgrown.append(self._partial)
            self._partial = torch.empty(count, dtype=torch.int32, device=self._partial.device)
        return self._partial
