"""Rounding what pruning leaves: what is aimed at, and how far the values of weights reach that stay."""

import torch
from torch import Tensor

from llmcompress.solve.column_sweep import as_stored, in_order
from llmcompress.solve.damping import Factor
from llmcompress.solve.masked import refitted
from llmcompress.solve.prune import Pruned
from llmcompress.solve.row_blocks import RowBlocks
from llmcompress.solve.sparsegpt import FixedMask, MaskChoice

_STEPS = 10  # of conjugate gradients: then the error is within a hundredth or so of the least
_ROWS = 512  # refitted at once


class MaskedTarget:
    """Weights [out, in] on their way to codes, some of which are gone already, or will be chosen to go meanwhile.

    aim [out, in]: what is rounded; where weights are gone, the others have made up for them. ranged [out, in]: whose
    ranges are looked for, which making up for others changes.
    """

    def __init__(
        self,
        wanted: Tensor,
        sparse: Pruned | MaskChoice,
        factor: Factor,
        order: Tensor,
        hessian: Tensor,
        blocks: RowBlocks,
    ) -> None:
        """wanted [out, in]: whose outputs are aimed at. hessian [in, in]: damped; factor: of it, in `order` [in]."""
        self.aim = self.ranged = wanted
        self._sparse, self._factor = sparse, factor
        self._keep: Tensor | None = None
        if isinstance(sparse, Pruned):
            self.aim = self.ranged = _refitted(sparse.weight, wanted, sparse.keep, hessian, blocks)
            self._keep = in_order(sparse.keep, order).to(torch.float32)
        else:
            keep = as_stored(sparse.guess(in_order(wanted, order), factor.pivots), order).contiguous()
            self.ranged = _refitted(wanted, wanted, keep, hessian, blocks)

    def mask(self, part: slice) -> FixedMask:
        """Of some rows, which weights stay."""
        if isinstance(self._sparse, MaskChoice):
            return self._sparse.mask(self._factor.pivots, len(self.aim[part]))
        assert self._keep is not None
        return FixedMask(self._keep[:, part].contiguous())


def _refitted(weight: Tensor, target: Tensor, keep: Tensor, hessian: Tensor, blocks: RowBlocks) -> Tensor:
    def rows(part: slice) -> Tensor:
        return refitted(weight[part], target[part], keep[part], hessian, _STEPS)

    return torch.cat(blocks.map(rows, weight, _ROWS))
