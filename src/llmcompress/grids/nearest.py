"""A matrix as plain rounding to a grid would leave it: what a search that tries many candidates can afford."""

from torch import Tensor

from llmcompress.grids.base import Spec
from llmcompress.grids.grid_type import type_of
from llmcompress.workers import Workers


def nearest(weight: Tensor, spec: Spec, workers: Workers) -> Tensor:
    """weight [out, in] float32 rounded to nearest, ranges that cover every weight; float32 values.

    Of grids with outliers, what lies beside them.
    """
    return type_of(spec).nearest(weight, spec, workers)


def spread(rows: int, count: int) -> slice:
    """At most `count` of so many rows, evenly spread."""
    return slice(None, None, max(1, -(-rows // count)))


def some_rows(weight: Tensor, count: int) -> Tensor:
    """At most `count` rows of a matrix, evenly spread."""
    return weight[spread(weight.shape[0], count)]
