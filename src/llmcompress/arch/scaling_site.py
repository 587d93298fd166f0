"""Where channels of a layer can be scaled: what writes them, and what reads them."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Index: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SitePart:
    """What a factor per channel does to one module: its weight, and where outputs are meant, its bias.

    path: module path below the layer. inputs: the factors belong to the module's inputs, else to its outputs. divided:
    by the factors, else multiplied. at: which of those inputs or outputs, None for all. spread: the number of the
    factor of each of them, None if they are numbered alike. offset: of a norm's weight.
    """

    path: str
    inputs: bool = False
    divided: bool = False
    at: Index | None = None
    spread: Index | None = None
    offset: float = 0.0


@dataclass(frozen=True)
class Site:
    """Channels that can be scaled. channels: how many factors there are. writer divides, readers multiply.

    norm: whether a norm writes them. heads: key-value heads that the channels belong to, 0 if none.
    """

    space: str
    channels: int
    writer: SitePart
    readers: tuple[SitePart, ...]
    norm: bool = False
    heads: int = 0

    @property
    def spread(self) -> Index | None:
        """The number of the factor of each channel that readers see; None if they are numbered alike."""
        return next((part.spread for part in self.readers if part.spread is not None), None)

    @property
    def width(self) -> int:
        """Channels that readers see."""
        return self.channels if self.spread is None else len(self.spread)

    @property
    def parts(self) -> tuple[SitePart, ...]:
        return (self.writer, *self.readers)
