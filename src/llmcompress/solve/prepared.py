"""GPTQ on one Gram matrix, made ready once for any number of rows and grids."""

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded, Grid
from llmcompress.solve.damping import Factor, damped
from llmcompress.solve.gptq import gptq_codes
from llmcompress.solve.refine import Refiner


def column_order(hessian: Tensor, by_energy: bool) -> Tensor:
    """The order [in] in which columns are rounded: by the diagonal of the Gram matrix [in, in], or as stored."""
    energy = hessian.diagonal()
    if not by_energy:
        return torch.arange(energy.numel(), device=energy.device)
    return torch.argsort(energy, descending=True, stable=True)  # stable: ties must not depend on the machine


class Prepared:
    """What sweep and descent need of a Gram matrix [in, in]. factor: of it, its columns in `order` [in]."""

    def __init__(self, hessian: Tensor, order: Tensor, factor: Factor) -> None:
        self.order, self.factor = order, factor
        # what a rounding error in a column costs once the columns after it have made up for it: the loss is the sum of
        # the squared residuals times this, so it is what a scale should be fitted by
        self.cost = torch.empty_like(hessian.diagonal())
        self.cost[order] = factor.pivots**-2
        self._refiner = Refiner(damped(hessian, factor.percdamp), order)

    @property
    def hessian(self) -> Tensor:
        """The Gram matrix, damped."""
        return self._refiner.hessian

    def codes(
        self,
        weight: Tensor,
        grid: Grid,
        scale_dtype: torch.dtype,
        rounds: int,
        block_size: int = 128,
        keep: Tensor | None = None,
    ) -> Coded:
        """Codes of rows [out, in] on a grid fitted to them: the sweep, then `rounds` of descent.

        keep [in, out]: as of `gptq_codes`.
        """
        coded = gptq_codes(weight, grid, self.factor, self.order, block_size, keep)
        return self._refiner.refine(weight, coded, scale_dtype, rounds, keep)
