"""Round to nearest: no calibration, one pass over the weights. The baseline every other method must beat.

With `clip: output` ranges are chosen on calibration inputs; codes are still the nearest ones.
"""

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from llmcompress.errors import RunError
from llmcompress.grids.base import BlockSpec, joins_rows
from llmcompress.methods.base import SOLVED_ROWS, Method, Solved, Statistics

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Rtn(Method):
    """Round every weight to the nearest value of its group's grid."""

    name: ClassVar[str] = "rtn"
    summary: ClassVar[str] = "Round to nearest: seconds, without calibration unless clip is output."

    @property
    def needs_gram(self) -> bool:
        return self.clip == "output" and self.gguf is None

    @property
    def inverts(self) -> bool:
        return False

    def solve(self, weight: "Tensor", stats: Statistics, scale_dtype: "torch.dtype") -> Solved:
        from llmcompress.grids.coded import Coded
        from llmcompress.grids.encoders import encode
        from llmcompress.grids.fitting import fit
        from llmcompress.parallel import together
        from llmcompress.solve.outliers import beside, remaining

        spec = self.grid
        if isinstance(spec, BlockSpec):
            return Solved(encode(weight, spec, self.search, stats.importance))
        if self.needs_gram and stats.gram is None:
            raise RunError("rtn with clip: output needs the statistics of its inputs")
        gram = stats.gram.finish() if self.needs_gram and stats.gram is not None else None
        outliers, crowded = self.outlier_index(stats)
        rest = weight if outliers is None else weight[:, remaining(outliers, weight.shape[1])]
        fitted = partial(fit, spec=spec, clip=self.clip, gram=gram, scale_dtype=scale_dtype)
        common = fitted(rest) if joins_rows(spec) else None

        def rounded(part: slice) -> Coded:
            grid = fitted(rest[part]) if common is None else common.rows(part)
            return Coded(grid.encode(rest[part]), grid)

        starts = range(0, rest.shape[0], SOLVED_ROWS)
        coded = Coded.stacked(together(partial(rounded, slice(start, start + SOLVED_ROWS)) for start in starts))
        return Solved(coded if outliers is None else beside(coded, weight, outliers), crowded_outliers=crowded)


METHOD = Rtn
