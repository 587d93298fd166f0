"""SmoothQuant (Xiao et al., 2022, arXiv:2211.10438): move outliers of activations into weights."""

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from llmcompress.transforms.base import Scalable, Scaling, usable

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.workers import Workers

_ROWS = 256
_ALPHAS = tuple(step / 20 for step in range(2, 20))
_LEVELS = 127  # of an activation in 8 bits, each side


class SmoothQuant(Scaling):
    """Scale s = max|x|^alpha / max|w|^(1 - alpha) of every input channel (equation 4)."""

    name: ClassVar[str] = "smoothquant"
    summary: ClassVar[str] = "SmoothQuant: scales that share outliers out between activations and weights."

    alpha: float | None = Field(
        None, ge=0, le=1, description="how much goes into the weights; none: searched for every site by its error"
    )
    flows: bool = Field(
        True, description="also where no norm is in front: between up_proj and down_proj, v_proj and o_proj"
    )

    def wants(self, follows_norm: bool) -> bool:
        return follows_norm or self.flows

    def factors(self, site: Scalable, workers: "Workers") -> "Tensor":
        import torch

        largest = site.tied(site.inputs.largest, largest=True)
        weights = site.tied(torch.stack([reader.weight.abs().amax(dim=0) for reader in site.readers]).amax(dim=0), True)
        alive = (largest > 0) & (weights > 0)

        def factors(alpha: float) -> "Tensor":
            return usable(largest.clamp_min(1e-5) ** alpha / weights.clamp_min(1e-5) ** (1 - alpha), alive)

        if self.alpha is not None:
            return factors(self.alpha)
        candidates = [torch.ones_like(largest), *(factors(alpha) for alpha in _ALPHAS)]
        losses = workers.distribute(partial(_loss, site, site.spread_out(candidate)) for candidate in candidates)
        return candidates[losses.index(min(losses))]


def _loss(site: Scalable, scale: "Tensor") -> float:
    """Expected squared output error per token of rounding weights, and activations to 8 bits per token.

    The error of an activation is taken for noise of variance step^2 / 12 that knows nothing of the weights, so its part
    is that variance times the squares of the weights.
    """
    from llmcompress.grids.nearest import nearest, some_rows
    from llmcompress.workers import SERIAL

    step = (site.inputs.tokens / scale).abs().amax(dim=1) / _LEVELS
    noise = float((step.square() / 12).mean()) if len(step) else 0.0
    hessian = site.inputs.hessian / scale / scale[:, None]
    loss = 0.0
    for reader in site.readers:
        if reader.grid is None:
            continue
        weight = some_rows(reader.weight, _ROWS) * scale
        delta = nearest(weight, reader.grid, SERIAL) - weight
        rounded = float((delta @ hessian).mul_(delta).sum())
        loss += (rounded + noise * float(weight.square().sum())) * reader.weight.shape[0] / weight.shape[0]
    return loss


TRANSFORM = SmoothQuant
