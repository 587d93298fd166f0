"""What a statistic of an input is: one file of this package, found by its `STATISTIC`.

A method or pruner names in `needs` the statistics that it goes by. `collect` (engine/run/collect.py) makes the
accumulators for every input that matrices with such steps read, adds the input to them batch by batch, and hands them
over as `Statistics.found`, by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from llmcompress.workers import Part, Workers


class Counted(Protocol):
    """Knows of how many tokens it was made. dropped: tokens that were left out for inf or nan, and are not counted."""

    @property
    def tokens(self) -> int: ...

    @property
    def dropped(self) -> int: ...


class Accumulator(Counted, Protocol):
    """Adds something up over the tokens of one input.

    One whose sum is shared out to ranks is `Panelled` too (stats/panels.py).
    """

    def update(self, x: Tensor) -> None:
        """Add an input [..., in] of any float type; [windows, length, in] where the statistic is `by_window`."""
        ...


class PairedAccumulator(Counted, Protocol):
    """Adds something up over the tokens of one input and over the same tokens in the uncompressed model."""

    def update(self, original: Tensor, x: Tensor) -> None:
        """Add an input of the uncompressed model and of the compressed one, of the same shape."""
        ...

    def original_ended(self, beside: Any) -> None:
        """Told where the uncompressed model runs on fewer windows, after the last of them, and only there.

        beside: the accumulator of the statistic `beside`, which has seen just these windows so far.
        """
        ...


Maker = Callable[[int, Workers, torch.device, Part], Any]
"""Makes an empty accumulator for an input of so many channels: whose threads it may use, on which device, for which
part of a sum that ranks share."""


@dataclass(frozen=True)
class Statistic:
    """A statistic of an input as the compressed model sees it.

    name: as steps say it in `needs`. make: an empty `Accumulator`. unless: another statistic, which says all that this
    one does: where both are needed, that one is enough. multiplied: whether inputs come as matrices will multiply them,
    rounded where their inputs will be. by_window: whether inputs come as [windows, length, in], so
    that the first token of each window can be left out; those of experts are loose tokens [tokens, in] all the same.
    """

    name: str
    make: Maker
    unless: str | None = None
    multiplied: bool = False
    by_window: bool = False


@dataclass(frozen=True)
class PairedStatistic:
    """A statistic of an input in both models, gathered wherever the uncompressed model runs beside the compressed one.

    The input in the compressed model comes as matrices will multiply it, rounded where their inputs will be.
    make: an empty `PairedAccumulator`. beside: the statistic that steps need for this one to be gathered too.
    """

    name: str
    make: Maker
    beside: str
