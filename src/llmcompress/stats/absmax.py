"""The largest magnitude of each channel of an input."""

import torch
from torch import Tensor

from llmcompress.stats.statistic import Statistic


def after_first(x: Tensor) -> Tensor:
    """Tokens [tokens, in] of an input, without the first of each window where it is [windows, length, in].

    The first token of a text enters many matrices with magnitudes a hundred times those of all other tokens, since
    attention uses it as a place to rest. A fixed range that held it would leave the other tokens no resolution.
    """
    later = x[:, 1:] if x.ndim == 3 else x
    return later.reshape(-1, x.shape[-1])


def finite_rows(rows: Tensor) -> Tensor:
    """The rows [tokens, in] without inf or nan."""
    if bool(torch.isfinite(rows.sum())):  # one reduction per batch; the exact test only where it fails
        return rows
    return rows[torch.isfinite(rows).all(dim=-1)]


class AbsMax:
    """Accumulates max |x| over tokens, by channel [in], in float32; the first token of each window is left out.

    tokens: how many were counted. dropped: how many were left out for inf or nan.
    """

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        self.channels = torch.zeros(size, dtype=torch.float32, device=device)
        self.tokens = 0
        self.dropped = 0

    def update(self, x: Tensor) -> None:
        """Add an input [windows, length, in], or of loose tokens [tokens, in], of any float type."""
        every = after_first(x.detach())
        rows = finite_rows(every)
        self.dropped += every.shape[0] - rows.shape[0]
        self.tokens += rows.shape[0]
        if rows.shape[0]:
            torch.maximum(self.channels, rows.abs().amax(dim=0).to(torch.float32), out=self.channels)

    def merge(self, other: "AbsMax") -> None:
        """Add what another has seen."""
        torch.maximum(self.channels, other.channels, out=self.channels)
        self.tokens += other.tokens
        self.dropped += other.dropped

    @property
    def peak(self) -> float:
        """The largest magnitude of all."""
        return float(self.channels.max())


STATISTIC = Statistic("absmax", lambda size, workers, device, part: AbsMax(size, device), by_window=True)
