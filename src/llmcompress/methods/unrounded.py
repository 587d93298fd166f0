"""No rounding: the step that stands at the end of a recipe that only prunes."""

from typing import TYPE_CHECKING, ClassVar

from llmcompress.errors import RunError
from llmcompress.grids.base import Spec
from llmcompress.grids.dense import DenseSpec
from llmcompress.methods.base import Method, Solved, Statistics

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from llmcompress.solve.prune import Pruned
    from llmcompress.solve.row_blocks import RowBlocks
    from llmcompress.solve.sparsegpt import MaskChoice


class Unrounded(Method):
    """Keep what a pruner leaves, in the type `dtype` that the matrix is stored in."""

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "No rounding."

    dtype: str

    @property
    def grid(self) -> Spec:
        return DenseSpec(self.dtype)

    @property
    def needs_gram(self) -> bool:
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
        from llmcompress.grids.dense import DenseGrid
        from llmcompress.solve.prune import Pruned

        grid = DenseGrid(DenseSpec(self.dtype))
        codes = grid.encode(pruned.weight if isinstance(pruned, Pruned) else weight)
        if not bool(torch.isfinite(codes).all()):
            raise RunError(f"weights overflow {self.dtype} once others have gone", "use a smaller --sparsity")
        return Solved(Coded(codes, grid))
