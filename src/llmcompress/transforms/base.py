"""The base of transforms: options and, for transforms that scale channels, the choice of a site's factors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict

from llmcompress.grids.base import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.stats.inputs import Inputs
    from llmcompress.workers import Workers

WIDEST = 1e4  # largest factor, and inverse of the smallest: gains are stored in 16 bits


class Transform(BaseModel):
    """Options of a change that leaves the function of a model as it is (a frozen pydantic model).

    A transform file defines a subclass and names it `TRANSFORM`; every field is an option in recipes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str]
    summary: ClassVar[str]
    needs_calibration: ClassVar[bool]


@dataclass(frozen=True)
class Reader:
    """A matrix that reads the channels. weight [out, in] float32; grid: None if the weight is not rounded."""

    weight: "Tensor"
    grid: Spec | None


@dataclass(frozen=True)
class Scalable:
    """A site as a scaling transform sees it.

    inputs: statistics of the channels as readers see them [in]. channels: how many factors there are. compensated:
    whether the step that rounds makes up for the error of a column in those after it. spread [in]: the number of each
    channel's factor; None where every channel has its own. measured: what a scale [in] costs in the output of the block
    that reads the channels, in squares; None where that is the readers' own output.
    """

    inputs: "Inputs"
    readers: tuple[Reader, ...]
    channels: int
    compensated: bool = False
    spread: "Tensor | None" = None
    measured: "Callable[[Tensor], float] | None" = None

    def tied(self, values: "Tensor", largest: bool = False) -> "Tensor":
        """Values of channels [in] as those of factors [channels]: means, or the largest, of channels that share one."""
        import torch

        if self.spread is None:
            return values
        reduce = "amax" if largest else "mean"
        start = torch.zeros(self.channels, dtype=values.dtype, device=values.device)
        return start.scatter_reduce(0, self.spread, values, reduce, include_self=False)

    def spread_out(self, factors: "Tensor") -> "Tensor":
        """Factors [channels] as a scale of channels [in]."""
        return factors if self.spread is None else factors[self.spread]


class Scaling(Transform):
    """A transform that divides what writes a space by factors per channel, and multiplies what reads it."""

    needs_calibration: ClassVar[bool] = True

    def wants(self, follows_norm: bool) -> bool:
        """Whether a site is scaled whose channels a norm writes, or else a matrix."""
        return True

    @property
    def measures_blocks(self) -> bool:
        """Whether `Scalable.measured` is wanted."""
        return False

    def factors(self, site: Scalable, workers: "Workers") -> "Tensor":
        """Positive finite factors [channels] float32, 1 where scaling gains nothing; `workers` share the search."""
        raise TypeError(f"{self.name} scales nothing")


def usable(factors: "Tensor", alive: "Tensor") -> "Tensor":
    """Factors [channels] over the geometric mean of their extremes, clamped to WIDEST; 1 for channels not `alive`."""
    import torch

    alive = alive & torch.isfinite(factors) & (factors > 0)
    if not bool(alive.any()):
        return torch.ones_like(factors)
    kept = factors[alive]
    middle = (kept.amax().sqrt() * kept.amin().sqrt()).clamp_min(1e-30)
    return torch.where(alive, factors / middle, 1.0).clamp(1 / WIDEST, WIDEST)
