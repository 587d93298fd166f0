"""Round to nearest: no data, one pass over the weights. The baseline every other method must beat."""

from typing import TYPE_CHECKING, ClassVar

from llmcompress.methods.base import Method, Solved, Statistics

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Rtn(Method):
    """Round every weight to the nearest value of its group's grid."""

    name: ClassVar[str] = "rtn"
    summary: ClassVar[str] = "Round to nearest: no calibration, seconds."
    needs_calibration: ClassVar[bool] = False

    def solve(self, weight: "Tensor", stats: Statistics, scale_dtype: "torch.dtype") -> Solved:
        from llmcompress.grids.integer import Coded, fit

        grid = fit(weight, self.grid, clip=self.clip, scale_dtype=scale_dtype)
        return Solved(Coded(grid.encode(weight), grid))


METHOD = Rtn
