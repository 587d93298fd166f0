"""Fixed scales of inputs: one for all that read an input, from the range that calibration has seen."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from llmcompress.errors import PlanError, RunError
from llmcompress.grids.inputs import static_scale
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Statistics
from llmcompress.store.checkpoint import DTYPES

if TYPE_CHECKING:
    from llmcompress.engine.matrix_plan import MatrixPlan


def check_ranges(planned: "Sequence[MatrixPlan]") -> None:
    """PlanError where matrices that read one input ask for different fixed scales: engines keep one for them all."""
    first: dict[tuple[int, str], MatrixPlan] = {}
    for plan in planned:
        if plan.method.fixed_inputs:
            other = first.setdefault((plan.layer, plan.space), plan)
            if _asked(other) != _asked(plan):
                raise PlanError(
                    f"{other.module} and {plan.module} read one input, which can have one fixed scale only",
                    "give both the same --activations and --activation-clip",
                )


def _asked(plan: "MatrixPlan") -> tuple[object, ...]:
    method = plan.method
    return method.activations, method.activation_clip, method.activation_percentile


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
