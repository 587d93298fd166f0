"""Fixed scales of inputs: one for all that read an input, from the range that calibration has seen."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from llmcompress.errors import RunError
from llmcompress.grids.inputs import static_scale
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Statistics
from llmcompress.store.checkpoint import DTYPES

if TYPE_CHECKING:
    from llmcompress.engine.plan.matrix_plan import MatrixPlan


def input_scale(plan: "MatrixPlan", stats: Statistics) -> Tensor:
    """The fixed scale [1] of the inputs of a matrix, of its input's range: matrices that read one have the same."""
    method = plan.method
    assert plan.entry.inputs is not None
    if stats.range is None:
        raise RunError(f"no range of the inputs of {plan.module} was measured")
    percentile = method.activation_percentile if method.activation_clip == "percentile" else None
    return static_scale(plan.entry.inputs, stats.range, percentile, DTYPES[plan.entry.source.dtype])


def lend_ranges(found: Mapping[str, Statistics], needing: "Mapping[str, list[MatrixPlan]]", ledger: Ledger) -> None:
    """Experts that no token was sent to take the range of all others with the same part in the block."""
    for space, statistics in found.items():
        seen, plan = statistics.range, needing[space][0]
        if seen is None or seen.tokens:
            continue
        leaf = plan.path.rpartition(".")[2]
        for other, theirs in found.items():
            if other != space and theirs.range is not None and needing[other][0].path.endswith(f".{leaf}"):
                seen.merge(theirs.range)  # type: ignore[arg-type]
        ledger.note("starved_expert", plan.module, "no tokens: the range of its inputs is that of all experts")
