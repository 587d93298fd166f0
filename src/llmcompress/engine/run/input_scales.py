"""Fixed scales of inputs: one scale for all matrices that read an input, from the range that calibration has seen."""

from typing import TYPE_CHECKING

from torch import Tensor

from llmcompress.errors import RunError
from llmcompress.grids.inputs import divisor, static_scale
from llmcompress.methods.base import Statistics
from llmcompress.stats.absmax import AbsMax
from llmcompress.store.checkpoint import DTYPES

if TYPE_CHECKING:
    from llmcompress.engine.plan.matrix_plan import MatrixPlan


def input_scale(plan: "MatrixPlan", stats: Statistics) -> Tensor:
    """The fixed scale [1] or divisor of the input of a matrix, by its range; all that read one input share it."""
    method = plan.method
    assert plan.entry.inputs is not None
    seen = method.input_range(stats)
    if seen is None:
        raise RunError(f"no range of the inputs of {plan.module} was measured")
    if isinstance(seen, AbsMax) and method.divided_inputs:
        return divisor(seen)
    percentile = method.activation_percentile if method.activation_clip == "percentile" else None
    return static_scale(plan.entry.inputs, seen, percentile, DTYPES[plan.entry.source.dtype])
