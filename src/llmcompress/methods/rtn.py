"""Round to nearest: no calibration, one pass over the weights. The baseline every other method must beat."""

from typing import TYPE_CHECKING, ClassVar

from llmcompress.grids.base import BlockSpec
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
        from llmcompress.grids.coded import Coded
        from llmcompress.grids.encoders import encode
        from llmcompress.grids.fitting import fit

        spec = self.grid
        if isinstance(spec, BlockSpec):
            return Solved(encode(weight, spec, self.search, stats.importance))
        grid = fit(weight, spec, clip=self.clip, scale_dtype=scale_dtype)
        return Solved(Coded(grid.encode(weight), grid))


METHOD = Rtn
