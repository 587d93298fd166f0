"""The three levels at which the scales of a block type are searched."""

from torch import Tensor

from llmcompress.grids import compat, search
from llmcompress.grids.base import Search
from llmcompress.grids.blocks import BlockSpec
from llmcompress.grids.coded import Coded
from llmcompress.workers import Workers


def encode(weight: Tensor, spec: BlockSpec, level: Search, workers: Workers, importance: Tensor | None = None) -> Coded:
    """Weight [out, in] float32 rounded to a block type; importance [in]: what an error in an input channel costs.

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
