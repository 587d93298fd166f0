"""What a run will take: bytes written, disk, memory, passes; from headers and options alone."""

from dataclasses import dataclass
from math import ceil

from llmcompress.engine.plan.run_memory import RunMemory
from llmcompress.engine.train.training import AT_ONCE, BLOCK_STEPS

GRADIENT_TOKENS = 65_536  # of which gradients are known at least, where there are as many: half of them cost fidelity


@dataclass(frozen=True)
class Estimate:
    """output_bytes: exact size of all weight files and their index. The others are estimates in bytes.

    passes: forward passes over the calibration set through the whole model (a partial pass counts as one, the way back
    of gradients as another). gpu_bytes: of tensors on the GPU, where one is used; memory_bytes is main memory.
    bits_per_weight: of all tensors that are written; bits_per_quantised_weight: of what is quantised, scales included,
    None where nothing is.
    """

    output_bytes: int
    work_bytes: int
    memory_bytes: int
    passes: int
    source_bytes: int
    bits_per_weight: float
    bits_per_quantised_weight: float | None
    gpu_bytes: int = 0

    def bits(self) -> dict[str, float | None]:
        """Bits per weight and per quantised weight as documents have them."""
        quantised = self.bits_per_quantised_weight
        return {
            "bits_per_weight": round(self.bits_per_weight, 4),
            "bits_per_quantised_weight": None if quantised is None else round(quantised, 4),
        }


def estimate(run: RunMemory, output_bytes: int, bits_per_weight: float) -> Estimate:
    """Costs of a run whose weight files have `output_bytes`, and bits_per_weight of all tensors."""
    sizes = [(plan.entry.out_features * plan.entry.in_features, plan) for plan in run.matrices]
    weights, memory = sum(size for size, _ in sizes), run.model()
    rounded = [(size, plan) for size, plan in sizes if plan.entry.grid is not None]  # not where zeros alone are chosen
    bits = sum(size * plan.grid.bits_per_weight(plan.entry.in_features) for size, plan in rounded)
    return Estimate(
        output_bytes=output_bytes,
        work_bytes=int(weights * 1.1) + (_windows(run) if run.calibrated else 0) + sum(map(run.products, run.layers)),
        memory_bytes=memory.peak("host"),
        passes=((2 if run.paired else 1) + _gradient_passes(run) + _training(run)) if run.calibrated else 0,
        source_bytes=run.headers.nbytes,
        bits_per_weight=bits_per_weight,
        bits_per_quantised_weight=bits / sum(size for size, _ in rounded) if rounded else None,
        gpu_bytes=memory.peak("gpu"),
    )


def gradient_windows(samples: int, length: int) -> range:
    """The numbers of the windows that gradients are of: all of them, or one in so many."""
    return range(0, samples, max(1, samples * length // GRADIENT_TOKENS))


def _gradients_of(run: RunMemory) -> int:
    """How many windows gradients are of."""
    text = run.recipe.calibration
    return len(gradient_windows(text.samples, text.length)) if run.weighed else 0


def _gradient_passes(run: RunMemory) -> int:
    """Passes of gradients: forward, and through each layer there and back."""
    return ceil(3 * _gradients_of(run) / run.recipe.calibration.samples)


def _training(run: RunMemory) -> int:
    """Passes of the text, there and back, that layers are trained by."""
    return ceil(3 * BLOCK_STEPS * AT_ONCE / run.recipe.calibration.samples) if run.recovers else 0


def _windows(run: RunMemory) -> int:
    """Disk for hidden states (those read and those written) and for the inputs recorded while a layer is worked on."""
    text, resources = run.recipe.calibration, run.resources
    asked = max((plan.original_samples for plan in run.matrices), default=0)
    tokens = (text.samples + min(asked + resources.batch, text.samples if asked else 0)) * text.length
    recorded = max(
        sum({plan.space: plan.entry.in_features for plan in layer if plan.expert is None}.values())
        for layer in run.layers
    )
    kept = 2 * run.hidden if resources.gpu else 3 * run.hidden + recorded
    experts = text.samples * text.length * max(map(run.routed, run.layers))
    # what enters and leaves every layer and a layer's gradients, before there is anything else
    gradients = _gradients_of(run) * text.length * (len(run.layers) + 3) * run.hidden
    left = text.samples * text.length * run.hidden if run.recovers else 0  # what the original gave
    return max(tokens * kept + experts + left, gradients) * resources.item_bytes
