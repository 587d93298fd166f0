"""What a run will take: bytes written, disk, memory, passes; from headers and options alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from llmcompress.engine.plan.gpu_estimate import gpu_bytes
from llmcompress.engine.plan.options import FETCHED, Resources
from llmcompress.formats.gguf.file import ENCODED_AT_ONCE
from llmcompress.grids.base import PRODUCT_ROWS
from llmcompress.recipe import Recipe
from llmcompress.solve.row_blocks import SOLVED_ROWS
from llmcompress.store.folds import TURNED_ROWS
from llmcompress.store.headers import ModelHeaders
from llmcompress.transforms.base import Scaling
from llmcompress.transforms.rotate import Rotate

if TYPE_CHECKING:
    from llmcompress.engine.plan.matrix_plan import MatrixPlan

WITH_MODEL = 286_000_000  # Python with torch and transformers' model code, without the files of libraries
ALGEBRA = 26_000_000  # more once a matrix is factorised
_WITHOUT_MODEL = 272_000_000  # the same without a model and its forward passes
_WITH_GGUF = 26_000_000  # more with the gguf package and a vocabulary
_ENCODED = 12  # bytes that each weight of a chunk takes while it is encoded for GGUF
_COPIED = 1.4  # bytes for each of the largest tensor's: when it is read, not all memory of solved matrices is free yet
_TURNED = 3  # bytes for each of the largest tensor's where it is rotated, which is done in float32
_AT_WORK = 40  # bytes for each number of the rows that are being rotated, in float64
_BY_OUTPUT = 128  # bytes for each number of the rows whose ranges are searched by the error of outputs
_SAMPLED = 1024  # tokens kept of an input where scales are searched
PER_THREAD = 24_000_000  # buffers that torch's libraries keep for each further one
_WITH_CUDA = 2_500_000_000  # what CUDA's libraries and driver take of main memory, roughly: never measured here
_STAGED = 2  # bytes for each weight of a layer while its codes, from the GPU, are written
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Estimate:
    """output_bytes: exact size of all weight files and their index. The others are estimates in bytes.

    passes: forward passes over the calibration set through the whole model (a partial pass counts as one). gpu_bytes:
    of tensors on the GPU, where one is used; memory_bytes is main memory.
    """

    output_bytes: int
    work_bytes: int
    memory_bytes: int
    passes: int
    source_bytes: int
    bits_per_weight: float
    gpu_bytes: int = 0


def estimate(
    headers: ModelHeaders,
    recipe: Recipe,
    layers: "Sequence[Sequence[MatrixPlan]]",
    output_bytes: int,
    resources: Resources,
) -> Estimate:
    """Costs of a run whose matrices are `layers` and whose weight files have `output_bytes`."""
    matrices = [plan for layer in layers for plan in layer]
    weights = sum(plan.entry.out_features * plan.entry.in_features for plan in matrices)
    bits = sum(
        plan.entry.out_features * plan.entry.in_features * plan.grid.bits_per_weight(plan.entry.in_features)
        for plan in matrices
    )
    calibrated = recipe.needs_calibration or any(plan.needs_calibration for plan in matrices)
    paired = any(plan.original_samples for plan in matrices)
    largest = max(stored.spec.nbytes for stored in headers.tensors.values())
    item, hidden = ITEM_BYTES[resources.dtype], hidden_width(headers)
    on_gpu = gpu_bytes(layers, resources, item, recipe.calibration.length, hidden, largest) if resources.gpu else 0
    return Estimate(
        output_bytes=output_bytes,
        work_bytes=int(weights * 1.1) + (_windows(headers, recipe, layers, resources) if calibrated else 0),
        memory_bytes=_beside_gpu(headers, recipe, layers, resources)
        if resources.gpu
        else _memory(headers, recipe, layers, resources, calibrated, paired),
        passes=(2 if paired else 1) if calibrated else 0,
        source_bytes=headers.nbytes,
        bits_per_weight=bits / weights if weights else 0.0,
        gpu_bytes=on_gpu,
    )


def hidden_width(headers: ModelHeaders) -> int:
    config: Any = headers.config
    return int(config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 0)


def _windows(
    headers: ModelHeaders, recipe: Recipe, layers: "Sequence[Sequence[MatrixPlan]]", resources: Resources
) -> int:
    """Disk for hidden states (those read and those written) and for the inputs recorded while a layer is worked on."""
    samples, width = recipe.calibration.samples, hidden_width(headers)
    asked = max((plan.original_samples for layer in layers for plan in layer), default=0)
    tokens = (samples + min(asked + resources.batch, samples if asked else 0)) * recipe.calibration.length
    recorded = max(
        sum({plan.space: plan.entry.in_features for plan in layer if plan.expert is None}.values()) for layer in layers
    )
    return tokens * (2 * width if resources.gpu else 3 * width + recorded) * ITEM_BYTES[resources.dtype]


def _beside_gpu(
    headers: ModelHeaders, recipe: Recipe, layers: "Sequence[Sequence[MatrixPlan]]", resources: Resources
) -> int:
    """Main memory of a run on a GPU: the interpreter, CUDA, a tensor on its way, windows ahead, codes being written."""
    largest = max(stored.spec.nbytes for stored in headers.tensors.values())
    windows = resources.batch * recipe.calibration.length * hidden_width(headers) * ITEM_BYTES[resources.dtype]
    codes = max(
        (sum(plan.entry.out_features * plan.entry.in_features for plan in layer) for layer in layers), default=0
    )
    more = _WITH_GGUF + _ENCODED * ENCODED_AT_ONCE if recipe.output.format == "gguf" else 0
    return WITH_MODEL + _WITH_CUDA + more + 2 * largest + (FETCHED + 2) * windows + _STAGED * codes


def _memory(
    headers: ModelHeaders,
    recipe: Recipe,
    layers: "Sequence[Sequence[MatrixPlan]]",
    resources: Resources,
    calibrated: bool,
    paired: bool,
) -> int:
    """The interpreter, plus the larger of the embedding and the layer that takes most."""
    largest = max((stored.spec for stored in headers.tensors.values()), key=lambda spec: spec.nbytes)
    table, more = largest.nbytes, 0
    turned = any(isinstance(step, Rotate) and step.residual for step in recipe.transforms)
    if turned:
        table = _TURNED * table + _AT_WORK * TURNED_ROWS * hidden_width(headers)
    if recipe.output.format == "gguf":
        table, more = table + _ENCODED * min(prod(largest.shape), ENCODED_AT_ONCE), _WITH_GGUF
    if not calibrated:
        table = table if more or turned else int(_COPIED * table)
        return _WITHOUT_MODEL + more + max(table, *(_solving(layer, resources, False) for layer in layers))
    item, width = ITEM_BYTES[resources.dtype], hidden_width(headers)
    tokens = resources.batch * recipe.calibration.length
    most = 0
    for layer in layers:
        if not layer:
            continue
        loaded = sum(plan.entry.out_features * plan.entry.in_features for plan in layer) * item * (2 if paired else 1)
        solved = [plan for plan in layer if plan.needs_gram]  # others take no Gram matrix
        widths = {plan.space: plan.entry.in_features for plan in solved}
        experts = {plan.space: plan.entry.in_features for plan in solved if plan.expert is not None}
        widest = max(max(plan.entry.out_features, plan.entry.in_features) for plan in layer)
        # results of all threads, and of one more batch, wait; a thread has a few wide and a dozen narrow tensors
        running = tokens * (resources.threads + 1) * (3 * widest + 8 * width) * item
        kept = (3 if paired else 1) * 4 * max((columns**2 for columns in widths.values()), default=0)
        kept = max(kept, sum(4 * columns**2 for columns in experts.values()))
        most = max(most, loaded + kept + running, loaded + _solving(layer, resources, paired))
        if any(isinstance(step, Scaling) for step in recipe.transforms):
            seen = sum({plan.space: plan.entry.in_features for plan in layer if plan.expert is None}.values())
            most = max(
                most, loaded + _scaling(layer, resources, running + tokens * (resources.threads + 1) * item * seen)
            )
    more += ALGEBRA if any(plan.inverts for layer in layers for plan in layer) else 0
    return WITH_MODEL + more + PER_THREAD * (resources.threads - 1) + max(table + 4 * tokens * width * item, most)


def _scaling(layer: "Sequence[MatrixPlan]", resources: Resources, running: int) -> int:
    """Choosing scales: statistics of all inputs at once, and either the windows, or a site's matrices at work."""
    widths = {_site(plan): plan.entry.in_features for plan in layer}
    rows: dict[str, int] = {}
    for plan in layer:
        rows[_site(plan)] = rows.get(_site(plan), 0) + plan.entry.out_features
    kept = sum(4 * columns**2 + 4 * _SAMPLED * columns for columns in widths.values())
    largest = max(plan.entry.out_features * plan.entry.in_features for plan in layer)
    weights = max(rows[space] * columns for space, columns in widths.items())
    return kept + max(running, 4 * weights + 20 * largest * resources.threads + 8 * max(widths.values()) ** 2)


def _site(plan: "MatrixPlan") -> str:
    """Where the channels of an input are scaled: all experts' inputs are one norm's output."""
    return plan.space if plan.expert is None or plan.path.endswith("down_proj") else plan.space.rpartition(".")[0]


def _solving(layer: "Sequence[MatrixPlan]", resources: Resources, paired: bool) -> int:
    """Of the stage that takes most: square matrices of its statistics, and a dozen tensors of the rows at work."""
    most = 0
    rows: dict[tuple[str, str], int] = {}
    for plan in layer:
        key = plan.space, plan.settings
        rows[key] = rows.get(key, 0) + plan.entry.out_features
    for plan in layer:
        total, columns = rows[plan.space, plan.settings], plan.entry.in_features
        # without an inverse, rows are rounded in pieces that fit a processor's cache
        at_once = min(total, SOLVED_ROWS * resources.threads) if plan.inverts else 0
        squares = 4 * columns**2 * ((8 if paired else 5) if plan.inverts else plan.needs_gram)
        searched = _BY_OUTPUT * PRODUCT_ROWS * resources.threads if plan.method.clip == "output" else 0
        most = max(most, squares + columns * (16 * total + max(32 * at_once, searched)))
    waiting = {
        plan.space: 4 * plan.entry.in_features**2 for plan in layer if plan.expert is not None and plan.needs_gram
    }
    return most + sum(waiting.values())
