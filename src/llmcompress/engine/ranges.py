"""Fixed scales of inputs: what is asked for must be the same for all that read an input."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmcompress.errors import PlanError

if TYPE_CHECKING:
    from llmcompress.engine.plan import MatrixPlan


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
