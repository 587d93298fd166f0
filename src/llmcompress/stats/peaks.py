"""The largest magnitude of each channel of an input over all tokens, by which outlier channels are told."""

from torch import Tensor

from llmcompress.stats.absmax import AbsMax
from llmcompress.stats.statistic import Statistic


class Peaks(AbsMax):
    """Accumulates max |x| as `AbsMax` does, with the first token of each window, which has the largest outliers."""

    def update(self, x: Tensor) -> None:
        super().update(x.flatten(0, -2))


STATISTIC = Statistic("peaks", lambda size, workers, device, part: Peaks(size, device))
