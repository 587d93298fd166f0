"""A matrix as plain rounding to a grid would leave it: what a search that tries many candidates can afford."""

from torch import Tensor

from llmcompress.grids.base import BlockSpec, GridSpec, Int8Spec, Nf4Spec, ProgressiveSpec, Spec
from llmcompress.grids.encoders import encode
from llmcompress.grids.fitting import fit
from llmcompress.grids.integer import covering
from llmcompress.workers import Workers


def nearest(weight: Tensor, spec: Spec, workers: Workers) -> Tensor:
    """weight [out, in] float32 rounded to nearest, ranges that cover every weight; float32 values.

    Of grids with outliers, what lies beside them.
    """
    if isinstance(spec, BlockSpec):
        return encode(weight, spec, "fast", workers).decode()
    if isinstance(spec, GridSpec) and spec.type == "int":
        return covering(weight, spec)
    grid = fit(weight, spec, clip="minmax")
    return grid.decode(grid.encode(weight))


def rounds_at_once(spec: Spec) -> bool:
    """Whether plain rounding to a grid costs next to nothing, and is all there is to it: not tables, nor outliers."""
    whole = isinstance(spec, Int8Spec) and spec.outliers == 0
    return whole or isinstance(spec, BlockSpec | GridSpec | Nf4Spec | ProgressiveSpec)


def some_rows(weight: Tensor, count: int) -> Tensor:
    """At most `count` rows of a matrix, evenly spread."""
    return weight[:: max(1, -(-weight.shape[0] // count))]
