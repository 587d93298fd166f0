"""Wanda (Sun et al., 2023, arXiv:2306.11695) and RIA (Zhang et al., ICLR 2024): weights times what comes in."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from llmcompress.errors import RunError
from llmcompress.methods.base import Statistics
from llmcompress.pruners.base import Pruner

if TYPE_CHECKING:
    from torch import Tensor


class Wanda(Pruner):
    """Set the weights to zero whose product with the norm of their input is least; the others stay as they are."""

    name: ClassVar[str] = "wanda"
    summary: ClassVar[str] = "Wanda: drop weights that matter least by magnitude times input norm; one pass of text."

    score: Literal["wanda", "ria"] = Field(
        "wanda",
        description="|w| |x|, or RIA's: the share of |w| in its row plus that in its column, times the square root of "
        "|x|",
    )
    compare: Literal["row", "matrix"] = Field(
        "row", description="among which weights the least are looked for, without a pattern"
    )

    @property
    def needs_energy(self) -> bool:
        return True

    def kept(self, weight: "Tensor", stats: Statistics) -> "Tensor":
        from llmcompress.solve.prune import pruned_mask

        if stats.energy is None:
            raise RunError(f"{self.name} needs the statistics of its inputs")
        energy = stats.energy.to(weight.device)
        size = weight.abs()
        if self.score == "ria":
            size = size / size.sum(dim=0).clamp_min(1e-30) + size / size.sum(dim=1, keepdim=True).clamp_min(1e-30)
            score = size * energy**0.25  # |x|^0.5, the authors' exponent
        else:
            score = size * energy.sqrt()
        return ~pruned_mask(score, self.share, self.runs, self.compare == "matrix")


PRUNER = Wanda
