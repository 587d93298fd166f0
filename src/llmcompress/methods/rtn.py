"""Round to nearest: no calibration, one pass over the weights. The baseline every other method must beat.

With `clip: output` ranges are chosen on calibration inputs; codes are still the nearest ones.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import Field, model_validator

from llmcompress.errors import RunError
from llmcompress.methods.base import Method, Solved, Statistics

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from llmcompress.grids.integer import IntegerSpec
    from llmcompress.solve.prune import Pruned
    from llmcompress.solve.row_blocks import RowBlocks
    from llmcompress.solve.sparsegpt import MaskChoice


class Rtn(Method):
    """Round every weight to the nearest value of its group's grid."""

    name: ClassVar[str] = "rtn"
    summary: ClassVar[str] = "Round to nearest: seconds; calibrated only where inputs are measured."

    per_tensor: bool = Field(
        False, description="one scale for a whole matrix instead of one per row, as O1 and O3 of SmoothQuant have it"
    )

    @model_validator(mode="after")
    def _whole(self) -> "Rtn":
        """ValueError where one scale for a matrix is no question of its ranges alone."""
        if self.per_tensor and (self.type, self.group_size, self.sym) != ("int", -1, True):
            raise ValueError("per_tensor is for symmetric integers with group size -1")
        if self.per_tensor and self.clip == "output":
            raise ValueError("per_tensor ranges are searched by the weights alone: clip search or minmax")
        return self

    @property
    def joins_rows(self) -> bool:
        return self.per_tensor or super().joins_rows

    @property
    def needs_gram(self) -> bool:
        return self.clip == "output" and self.grid_type.clips

    @property
    def inverts(self) -> bool:
        return False

    def solve(
        self,
        weight: "Tensor",
        stats: Statistics,
        scale_dtype: "torch.dtype",
        blocks: "RowBlocks",
        pruned: "Pruned | MaskChoice | None" = None,
    ) -> Solved:
        import torch

        from llmcompress.grids.coded import Coded
        from llmcompress.grids.fitting import fit
        from llmcompress.grids.integer import fit_whole
        from llmcompress.solve.outliers import remaining, with_outliers
        from llmcompress.solve.prune import Pruned

        spec = self.grid
        weight = pruned.weight if isinstance(pruned, Pruned) else weight
        if found := self.grid_type.rounded(weight, spec, self.search, blocks.workers, stats.importance):
            return Solved(found)
        if self.needs_gram and stats.gram is None:
            raise RunError("rtn with clip: output needs the statistics of its inputs")
        gram = stats.gram.finish() if self.needs_gram and stats.gram is not None else None
        outliers, crowded = self.kept_channels(stats)
        rest = weight if outliers is None else weight[:, remaining(outliers, weight.shape[1])]
        fitted: Any = partial(fit, spec=spec, clip=self.clip, gram=gram, scale_dtype=scale_dtype)
        if self.per_tensor:
            fitted = partial(fit_whole, spec=cast("IntegerSpec", spec), clip=self.clip, scale_dtype=scale_dtype)
        common = fitted(rest) if self.joins_rows else None

        def rounded(part: slice) -> Coded:
            rows = rest[part].to(torch.float32)
            grid = fitted(rows) if common is None else common.rows(part)
            return Coded(grid.encode(rows), grid)

        coded = Coded.stacked(blocks.map(rounded, rest))
        return Solved(coded if outliers is None else with_outliers(coded, weight, outliers), crowded_outliers=crowded)


METHOD = Rtn
