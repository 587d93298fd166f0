"""The means of a run: the type its layers run in, windows in a batch, threads; as many as the memory allowed is for."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from llmcompress.engine.estimate import Estimate, Means
from llmcompress.errors import PlanError

if TYPE_CHECKING:
    from llmcompress.engine.plan import Options

MARGIN = 1.1  # by which memory may exceed its estimate
_BATCH_TOKENS = 1024  # run through a layer at once: on a processor, what stays in the caches is fastest


def choose_means(options: "Options", length: int, cost_of: Callable[[Means], Estimate]) -> tuple[Means, Estimate]:
    """Means for windows of `length` tokens, and what the run then takes by `cost_of`.

    Where the memory is bounded and more do not fit, there are fewer threads and smaller batches; PlanError if even the
    fewest do not.
    """
    means = usual_means(options, length)
    cost = cost_of(means)
    limit = options.max_memory
    while limit is not None and cost.memory_bytes * MARGIN > limit:
        if means.threads > 1 and options.threads is None:
            means = replace(means, threads=means.threads - 1)
        elif means.batch > 1 and options.batch is None:
            means = replace(means, batch=means.batch // 2)
        else:
            raise PlanError(
                f"up to {cost.memory_bytes * MARGIN / 1e9:.2f} GB of memory are needed, "
                f"--max-memory allows {limit / 1e9:.2f}",
                "use a shorter --length, --qep-alpha 0, or allow more",
            )
        cost = cost_of(means)
    return means, cost


def usual_means(options: "Options", length: int) -> Means:
    """What is asked for, or else as much as is fastest, whatever memory it takes."""
    import torch

    batch = options.batch or max(1, _BATCH_TOKENS // length)
    dtype = _compute_dtype(options.compute_dtype, options.device)
    return Means(dtype, batch, options.threads or torch.get_num_threads())


def _compute_dtype(asked: str, device: str) -> str:
    """The type layers run in: bfloat16 where the processor multiplies it fast, else float32."""
    if asked != "auto":
        return asked
    import torch

    from llmcompress.hardware import quick_type

    there = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return str(quick_type("cuda" if there else "cpu")).removeprefix("torch.")
