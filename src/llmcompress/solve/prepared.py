"""What GPTQ makes of a Gram matrix before it looks at a weight."""

import torch
from torch import Tensor

from llmcompress.solve.damping import Factor
from llmcompress.solve.refine import Refiner


def column_order(hessian: Tensor, by_energy: bool, together: int = 1) -> Tensor:
    """The order [in] in which columns are rounded: by the diagonal of the Gram matrix [in, in], or as stored.

    together: columns, one after another, that stay so.
    """
    energy = hessian.diagonal()
    if by_energy and together > 1:
        first = column_order(torch.diag(energy.view(-1, together).sum(1)), by_energy) * together
        return (first[:, None] + torch.arange(together, device=energy.device)).flatten()
    if not by_energy:
        return torch.arange(energy.numel(), device=energy.device)
    return torch.argsort(energy, descending=True, stable=True)  # stable: ties must not depend on the machine


class Prepared:
    """What fitting, sweep and descent need of a Gram matrix [in, in], whatever the rows and the grid.

    hessian: `damped` as its factor took it. factor: with its columns in `order` [in]. cost: of an error in each column
    [in].
    """

    def __init__(self, hessian: Tensor, order: Tensor, factor: Factor) -> None:
        self.order, self.factor = order, factor
        # what a rounding error in a column costs once the columns after it have made up for it: the loss is the sum of
        # the squared residuals times this, so it is what a scale should be fitted by
        self.cost = torch.empty_like(hessian.diagonal())
        self.cost[order] = factor.pivots**-2
        self.refiner = Refiner(hessian, order)
