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
        from llmcompress.grids.fitting import fitted
        from llmcompress.solve.outliers import beside, remaining

        spec = self.grid
        if isinstance(spec, BlockSpec):
            return Solved(encode(weight, spec, self.search, stats.importance))
        index, crowded = self.outlier_index(stats)
        rest = weight if index is None else weight[:, remaining(index, weight.shape[1])]
        grid = fitted(rest, spec, clip=self.clip, scale_dtype=scale_dtype)
        coded = Coded(grid.encode(rest), grid)
        return Solved(coded if index is None else beside(coded, weight, index), crowded_outliers=crowded)


METHOD = Rtn
