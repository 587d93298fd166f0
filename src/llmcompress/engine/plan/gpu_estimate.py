"""What a run takes of a GPU's memory, from shapes alone: tensors, without what CUDA keeps for itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmcompress.engine.plan.options import FETCHED
from llmcompress.grids.integer import SEARCHED
from llmcompress.hardware import MORE_ON_GPU
from llmcompress.solve.row_blocks import solved_rows
from llmcompress.stats.gram import PANELS

if TYPE_CHECKING:
    from llmcompress.engine.plan.matrix_plan import MatrixPlan
    from llmcompress.engine.plan.options import Resources

_SEARCHING = 40  # bytes for each weight whose scale is searched
_WORKSPACE = 100_000_000  # of cuBLAS and cuSOLVER


def gpu_bytes(
    layers: "Sequence[Sequence[MatrixPlan]]", resources: "Resources", item: int, length: int, hidden: int, table: int
) -> int:
    """At most at once: the embedding [bytes], a layer at work on its windows, or one whose matrices are solved.

    item: bytes of a number in the type that layers run in. length: of a window; hidden: width of the model.
    """
    matrices = [plan for layer in layers for plan in layer]
    paired = any(plan.original_samples for plan in matrices)
    calibrated = any(plan.needs_calibration for plan in matrices)
    tokens = resources.batch * length
    most = table + 2 * tokens * hidden * item if calibrated else 0
    for layer in filter(None, layers):
        loaded = sum(_size(plan) for plan in layer) * item * (2 if paired else 1) if calibrated else 0
        most = max(most, loaded + _running(layer, resources, tokens, item, hidden, paired) if calibrated else 0)
        most = max(most, loaded + _solving(layer, paired))
    return most + _WORKSPACE


def _size(plan: "MatrixPlan") -> int:
    return plan.entry.out_features * plan.entry.in_features


def _running(
    layer: "Sequence[MatrixPlan]", resources: "Resources", tokens: int, item: int, hidden: int, paired: bool
) -> int:
    """Windows on their way through a layer, those fetched ahead, and the sums of what a stage reads."""
    widest = max(max(plan.entry.out_features, plan.entry.in_features) for plan in layer)
    windows = tokens * item * (resources.threads * (4 * widest + 8 * hidden) + (FETCHED + 2) * hidden)
    squares = {plan.space: 4 * plan.entry.in_features**2 for plan in layer if plan.needs_gram}
    one = max(squares.values(), default=0)
    experts = sum(squares[plan.space] for plan in layer if plan.expert is not None and plan.needs_gram)
    # a sum; with another stream its drift, its mean of fewer windows, and a square while that is made
    return windows + max((4 if paired else 1) * one, experts) + one // PANELS


def _solving(layer: "Sequence[MatrixPlan]", paired: bool) -> int:
    """Of the stage that takes most: square matrices of its statistics, its weights, and the rows at work."""
    rows: dict[tuple[str, str], int] = {}
    for plan in layer:
        key = plan.space, plan.settings
        rows[key] = rows.get(key, 0) + plan.entry.out_features
    most = 0
    for plan in layer:
        total, columns = rows[plan.space, plan.settings], plan.entry.in_features
        # of float32: the Gram matrix, in order, and twice that in float64, with what the cast makes
        squares = 4 * columns**2 * (5 if plan.inverts else 2 * plan.needs_gram)
        at_once = min(total, solved_rows(columns, gpu=True))
        work = max(
            32 * at_once * columns if plan.inverts else 0, _SEARCHING * min(MORE_ON_GPU * SEARCHED, total * columns)
        )
        # before that: the Gram matrix, the drift, its own Gram matrix, their factor, and what is solved with
        drift = 4 * columns**2 * (6 if paired and plan.inverts else 0)
        most = max(most, 16 * total * columns + max(squares + work, drift))
    return most
