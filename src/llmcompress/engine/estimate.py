"""What a run will take: bytes written, disk, memory, passes; from headers and options alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcompress.formats.base import TensorSpec
from llmcompress.recipe import Recipe
from llmcompress.store.headers import ModelHeaders
from llmcompress.store.output import weights_nbytes

if TYPE_CHECKING:
    from llmcompress.engine.plan import MatrixPlan

_WITH_MODEL = 500_000_000  # Python with torch, a tokenizer and transformers' model code loaded
_WITHOUT_MODEL = 280_000_000  # Python with torch alone, which is all that methods without data need
ALIVE_LIMIT = 1_500_000_000  # bytes of activations that may be kept alive to save forwards
_ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Estimate:
    """output_bytes: exact size of all weight files and their index. The others are upper estimates in bytes.

    passes: forward passes over the calibration set through the whole model (a partial pass counts as one).
    one_forward: whether every batch of a layer is kept alive at once, so that one forward does (engine/forward.py).
    """

    output_bytes: int
    work_bytes: int
    memory_bytes: int
    passes: int
    source_bytes: int
    bits_per_weight: float
    one_forward: bool


def estimate(
    headers: ModelHeaders,
    recipe: Recipe,
    layers: "Sequence[Sequence[MatrixPlan]]",
    tensors: Sequence[TensorSpec],
    dtype: str,
    batch: int,
) -> Estimate:
    """Costs of a run whose matrices are `layers` and whose output tensors are `tensors`."""
    matrices = [plan for layer in layers for plan in layer]
    weights = sum(plan.entry.out_features * plan.entry.in_features for plan in matrices)
    bits = sum(
        plan.entry.out_features * plan.entry.in_features * plan.entry.grid.bits_per_weight(plan.entry.in_features)
        for plan in matrices
        if plan.entry.grid is not None
    )
    item = _ITEM[dtype]
    calibrated = any(plan.method.needs_calibration for plan in matrices)
    tokens = recipe.calibration.samples * recipe.calibration.length
    width = _hidden_width(headers)
    staged = int(weights * 1.1)
    streams = 2 if any(plan.method.needs_original for plan in matrices) else 1
    hidden = 2 * streams * tokens * width * item if calibrated else 0
    stages = max(len({plan.space for plan in layer if plan.expert is None}) for layer in layers)
    routed = any(plan.expert is not None for plan in matrices)
    widest = max(max(plan.entry.out_features, plan.entry.in_features) for plan in matrices)
    alive = streams * tokens * (4 * width + widest) * item
    one_forward = calibrated and not routed and alive <= ALIVE_LIMIT
    batched = batch * recipe.calibration.length
    memory = _memory(headers, layers, calibrated, item, batched, width, streams) + (alive if one_forward else 0)
    return Estimate(
        output_bytes=weights_nbytes(list(tensors), recipe.output.shard_size),
        work_bytes=staged + hidden,
        memory_bytes=memory,
        passes=streams * (1 if one_forward else stages + 1) if calibrated else 0,
        source_bytes=headers.nbytes,
        bits_per_weight=bits / weights,
        one_forward=one_forward,
    )


def _hidden_width(headers: ModelHeaders) -> int:
    config: Any = headers.config
    return int(config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 0)


def _memory(
    headers: ModelHeaders,
    layers: "Sequence[Sequence[MatrixPlan]]",
    calibrated: bool,
    item: int,
    tokens: int,
    width: int,
    streams: int,
) -> int:
    """Interpreter, plus the larger of the embedding phase and the widest layer with its statistics and one batch."""
    tables = max((s.spec.nbytes for s in headers.tensors.values()), default=0)
    widest = 0
    for layer in layers:
        sizes = [(plan.entry.out_features, plan.entry.in_features, plan.space) for plan in layer]
        if not sizes:
            continue
        loaded = sum(rows * columns for rows, columns, _ in sizes) * item * streams
        spaces = {space: columns for _, columns, space in sizes}
        grams = max(8 * columns * columns for columns in spaces.values())
        if any(plan.expert is not None for plan in layer):
            grams = sum(4 * columns * columns for columns in spaces.values())
        stacked = max(sum(r * c for r, c, s in sizes if s == space) for space in spaces)
        solve = 28 * max(columns for columns in spaces.values()) ** 2 + 24 * stacked
        activations = tokens * (8 * width + 3 * max(rows for rows, _, _ in sizes)) * item + 4 * tokens * max(
            spaces.values()
        )
        widest = max(widest, loaded + grams + max(solve, activations if calibrated else 0))
    return (_WITH_MODEL + max(widest, 2 * tables)) if calibrated else (_WITHOUT_MODEL + max(widest, tables))
