"""Checks that matrices which read one input agree on how that input is rounded."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmcompress.errors import PlanError

if TYPE_CHECKING:
    from llmcompress.engine.plan.matrix_plan import MatrixPlan


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
