"""How often each magnitude occurs in an input: a histogram of fixed size."""

import torch
from torch import Tensor

from llmcompress.stats.absmax import after_first, finite_rows
from llmcompress.stats.statistic import Statistic

_VALUES = 1 << 15  # of a bfloat16 without its sign


class Magnitudes:
    """Accumulates counts of |x|, rounded to bfloat16; the first token of each window is left out.

    counts [32768] int64: by the bits of the magnitude as bfloat16, which are in ascending order. tokens: how many were
    counted. dropped: how many were left out for inf or nan.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.counts = torch.zeros(_VALUES, dtype=torch.int64, device=device)
        self.tokens = 0
        self.dropped = 0

    def update(self, x: Tensor) -> None:
        """Add an input [windows, length, in], or of loose tokens [tokens, in], of any float type."""
        every = after_first(x.detach())
        rows = finite_rows(every)
        self.dropped += every.shape[0] - rows.shape[0]
        self.tokens += rows.shape[0]
        bits = rows.to(torch.bfloat16).abs().view(torch.int16).to(torch.int32)
        self.counts += torch.bincount(bits.reshape(-1), minlength=_VALUES)

    def merge(self, other: "Magnitudes") -> None:
        """Add what another has seen."""
        self.counts += other.counts
        self.tokens += other.tokens
        self.dropped += other.dropped

    def present(self) -> tuple[Tensor, Tensor]:
        """The magnitudes that occur, ascending, float32, and how often each occurs, float64."""
        found = self.counts.nonzero()[:, 0]
        return found.to(torch.int16).view(torch.bfloat16).to(torch.float32), self.counts[found].to(torch.float64)

    def percentile(self, share: float) -> float:
        """The smallest magnitude that `share` per cent of all values do not exceed; 0 where there are no values."""
        values, counts = self.present()
        if not values.numel():
            return 0.0
        below = counts.cumsum(0)
        place = int(torch.searchsorted(below, below[-1] * (share / 100)))
        return float(values[min(place, values.numel() - 1)])


STATISTIC = Statistic("magnitudes", lambda size, workers, device, part: Magnitudes(device), by_window=True)
