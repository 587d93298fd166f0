"""AWQ (Lin et al., 2023, arXiv:2306.00978): scale channels that see large inputs up, so that rounding spares them."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from llmcompress.transforms.base import Scalable, Scaling, usable

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.workers import Workers

_WORK = 1 << 27  # multiplications that a candidate may take at a site, on some rows of its matrices
_SHORTLIST = 5  # candidates measured on all rows next
_PERCDAMP = 0.01  # of the Gram matrix that GPTQ will invert
_MEASURED = 3  # candidates measured in the block last


class AwqScale(Scaling):
    """Scale s = mean|x|^r, or mean|x|^r / mean|w|^(1-r), with the exponent r whose rounding changes outputs least."""

    name: ClassVar[str] = "awq"
    summary: ClassVar[str] = "AWQ: scales of input channels, searched for the least error of the outputs."

    steps: int = Field(20, ge=1, le=1000, description="steps of the exponent from 0 (no scaling) to 1")
    duo_scaling: Literal["both", "never", "always"] = Field(
        "both", description="whether scales also divide by the size of the weights; both: each exponent tried both ways"
    )
    objective: Literal["gram", "block"] = Field(
        "gram",
        description="error that is compared: of the scaled matrices' outputs, over all tokens; or of the attention or "
        "feed-forward they belong to, on a few windows, for the three best of those",
    )

    @property
    def measures_blocks(self) -> bool:
        return self.objective == "block"

    def factors(self, site: Scalable, workers: "Workers") -> "Tensor":
        import torch

        from llmcompress.hardware import rounded_float32

        readers = [reader for reader in site.readers if reader.grid is not None]
        one = torch.ones(site.channels, device=site.inputs.mean.device)
        if not readers or not bool((site.inputs.mean > 0).any()):
            return one
        candidates = [one, *self._candidates(site)]
        square = site.inputs.hessian
        share = max(1, max(128, _WORK // square.numel()) // len(readers))
        with rounded_float32():  # losses are compared, no more
            cost = _compensated(square) if site.compensated else None
            losses = workers.distribute(
                partial(_loss, site, site.spread_out(factors), cost, share) for factors in candidates
            )
            short = list(dict.fromkeys((0, *_ascending(losses)[:_SHORTLIST])))
            exact = workers.distribute(
                partial(_loss, site, site.spread_out(candidates[number]), cost) for number in short
            )
        ranked = [short[place] for place in _ascending(exact)]
        if site.measured is None:
            return candidates[ranked[0]]
        wanted = list(dict.fromkeys((0, *ranked[:_MEASURED])))
        measured = [site.measured(site.spread_out(candidates[number])) for number in wanted]
        return candidates[wanted[_ascending(measured)[0]]]

    def _candidates(self, site: Scalable) -> "Iterator[Tensor]":
        mean = site.tied(site.inputs.mean)
        alive = mean > 0
        weights = site.tied(_weight_means(site))
        duo = {"both": (False, True), "never": (False,), "always": (True,)}[self.duo_scaling]
        for both in duo:
            for step in range(0 if both else 1, self.steps + 1):
                ratio = step / self.steps
                factors = mean**ratio / (weights ** (1 - ratio) + 1e-4) if both else mean**ratio
                yield usable(factors, alive)


def _weight_means(site: Scalable) -> "Tensor":
    """Mean |w| of each channel [in] over the rows of all readers, as a share of the largest of its group."""
    import torch

    total, count = torch.zeros_like(site.inputs.mean), 0
    for reader in site.readers:
        if reader.grid is None:
            continue
        rows, width = reader.weight.shape
        groups = reader.weight.abs().view(rows, -1, reader.grid.width(width))
        total += (groups / groups.amax(dim=2, keepdim=True).clamp_min(1e-30)).view(rows, width).sum(dim=0)
        count += rows
    return total / max(count, 1)


def _compensated(hessian: "Tensor") -> "Tensor":
    """What an error in each channel [in] costs once GPTQ has made up for it in the channels after it.

    Scaling channels by s divides both the error and the pivot of a channel by s: the costs are those of any scale.
    """
    import torch

    from llmcompress.solve.damping import inverse_factor

    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    cost = torch.empty_like(hessian.diagonal())
    cost[order] = inverse_factor(hessian, _PERCDAMP, order=order).pivots ** -2
    return cost


def _loss(site: Scalable, scale: "Tensor", cost: "Tensor | None", rows: int = 1 << 62) -> float:
    """Squared output error per token of rounding the scaled weights; of so many rows of each reader.

    tr(D H D^T), or with `cost` [in] that of every channel by itself.
    """
    from llmcompress.grids.nearest import nearest, some_rows
    from llmcompress.workers import SERIAL

    loss = 0.0
    for reader in site.readers:
        if reader.grid is not None:
            weight = some_rows(reader.weight, rows)
            delta = nearest(weight * scale, reader.grid, SERIAL).div_(scale).sub_(weight)
            bent = delta @ site.inputs.hessian if cost is None else delta * cost
            loss += float(bent.mul_(delta).sum()) * reader.weight.shape[0] / weight.shape[0]
    return loss


def _ascending(losses: list[float]) -> list[int]:
    """Indices of losses in ascending order; the earlier of equal losses comes first."""
    return sorted(range(len(losses)), key=losses.__getitem__)


TRANSFORM = AwqScale
