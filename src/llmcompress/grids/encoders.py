"""Rounding to a tensor type of GGUF, whose scales are searched at three levels."""

from torch import Tensor

from llmcompress.grids import compat, search
from llmcompress.grids.base import Search, Spec
from llmcompress.grids.blocks import BLOCK_TYPES, BlockSpec
from llmcompress.grids.coded import Coded
from llmcompress.grids.grid_type import Fitting, type_of
from llmcompress.packing.plain import plain
from llmcompress.workers import Workers


def encode(weight: Tensor, spec: Spec, level: Search, workers: Workers, importance: Tensor | None = None) -> Coded:
    """Weight [out, in] float32 rounded to a type of GGUF; importance [in]: what an error in an input channel costs.

    A grid that has a type in GGUF without being one of its block types has its own search. Where that finds scales
    alone, level compat is the gguf package's rounding.
    """
    if (block := BLOCK_TYPES.get(spec.name)) is not None:
        return _encoded(weight, block, level, workers, importance)
    kind = type_of(spec)
    if (found := kind.rounded(weight, spec, level, workers, importance)) is not None:
        return found
    if level == "compat":
        return kind.of_gguf_rows(spec, plain(weight, str(spec.gguf_type)))
    grid = kind.fit(weight, spec, Fitting(importance=importance))
    return Coded(grid.encode(weight), grid)


def _encoded(weight: Tensor, spec: BlockSpec, level: Search, workers: Workers, importance: Tensor | None) -> Coded:
    """Weight [out, in] rounded to a block type.

    compat: llama-quantize's own result. fast: as good, and no slower. best: all scales of a block refined together.
    Without importance the last two stand in for one another where that measures better: IQ4 is always refined, for
    which llama-quantize takes as long; types below four bits never, since least squares alone blunt the few large
    weights that matter most.
    """
    if level == "compat":
        return compat.encode(weight, spec, workers, importance)
    if importance is None:
        level = "best" if spec.curved else "fast" if spec.bits < 4 else level
    search_by = search.fast if level == "fast" else search.best
    return search_by(weight, spec, workers, importance)
