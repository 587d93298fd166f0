"""Magnitude pruning: the smallest weights go. The baseline every other pruner must beat."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from llmcompress.methods.base import Statistics
from llmcompress.pruners.base import Pruner

if TYPE_CHECKING:
    from torch import Tensor


class Magnitude(Pruner):
    """Set the weights of least magnitude to zero, whatever their inputs."""

    name: ClassVar[str] = "magnitude"
    summary: ClassVar[str] = "Magnitude: drop the smallest weights; seconds, and needs no text."

    compare: Literal["row", "matrix"] = Field(
        "matrix", description="among which weights the smallest are looked for, without a pattern"
    )

    def kept(self, weight: "Tensor", stats: Statistics) -> "Tensor":
        from llmcompress.solve.prune import pruned_mask

        return ~pruned_mask(weight.abs(), self.share, self.runs, self.compare == "matrix")


PRUNER = Magnitude
