"""Round to nearest: no calibration, one pass over the weights. The baseline every other method must beat.

With `clip: output` ranges are chosen on calibration inputs; codes are still the nearest ones.
"""

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from llmcompress.errors import RunError
from llmcompress.grids.base import BlockSpec
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
        import torch

        from llmcompress.grids.coded import Coded
        from llmcompress.grids.encoders import encode
        from llmcompress.grids.fitting import fit
        from llmcompress.parallel import together

        spec = self.grid
        if isinstance(spec, BlockSpec):
            return Solved(encode(weight, spec, self.search, stats.importance))
        if self.needs_gram and stats.gram is None:
            raise RunError("rtn with clip: output needs the statistics of its inputs")
        gram = None if stats.gram is None else stats.gram.finish()

        def rounded(part: torch.Tensor) -> Coded:
            grid = fit(part, spec, clip=self.clip, gram=gram, scale_dtype=scale_dtype)
            return Coded(grid.encode(part), grid)

        return Solved(Coded.stacked(together(partial(rounded, part) for part in torch.split(weight, SOLVED_ROWS))))


METHOD = Rtn
