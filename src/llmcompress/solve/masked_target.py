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

    ranged [out, in]: whose ranges are looked for, which making up for others changes.
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
        self._aim = self.ranged = wanted
        self._sparse, self._factor, self._hessian = sparse, factor, hessian
        self._keep: Tensor | None = None
        if isinstance(sparse, Pruned):
            self._aim = self.ranged = _refitted(sparse.weight, wanted, sparse.keep, hessian, blocks)
            self._keep = in_order(sparse.keep, order).to(torch.float32)
        else:
            keep = as_stored(sparse.guess(in_order(wanted, order), factor.pivots), order).contiguous()
            self.ranged = _refitted(wanted, wanted, keep, hessian, blocks)

    def rows(self, part: slice | Tensor) -> tuple[Tensor, Tensor]:
        """What is rounded of some rows: where weights are gone, the others have made up for them; and `ranged`."""
        return self._aim[part], self.ranged[part]

    def towards(self, part: slice | Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The same, of rows that aim at another target [some, in]; TypeError where weights are yet to be chosen."""
        if not isinstance(self._sparse, Pruned):
            raise TypeError("the weights that go are chosen for one target")
        moved = refitted(self._aim[part], target, self._sparse.keep[part], self._hessian, _STEPS)
        return moved, moved

    def mask(self, part: slice | Tensor) -> FixedMask:
        """Of some rows, which weights stay."""
        if isinstance(self._sparse, MaskChoice):
            return self._sparse.mask(self._factor.pivots, len(self._aim[part]))
        assert self._keep is not None
        return FixedMask(self._keep[:, part].contiguous())


def _refitted(weight: Tensor, target: Tensor, keep: Tensor, hessian: Tensor, blocks: RowBlocks) -> Tensor:
    def rows(part: slice) -> Tensor:
        return refitted(weight[part], target[part], keep[part], hessian, _STEPS)

    return torch.cat(blocks.map(rows, weight, _ROWS))
