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
_GPU_TOKENS = 8192  # on a GPU: products of so many rows fill it


def choose_means(options: "Options", length: int, cost_of: Callable[[Means], Estimate]) -> tuple[Means, Estimate]:
    """Means for windows of `length` tokens, and what the run then takes by `cost_of`.

    Where the memory is bounded and more do not fit, there are fewer threads and smaller batches; PlanError if even the
    fewest do not. A GPU bounds its memory by itself: the batch follows from all it has, whoever uses it now.
    """
    means = usual_means(options, length)
    cost = cost_of(means)
    limits = _limits(options, means)
    while short := _short(cost, limits):
        if means.threads > 1 and options.threads is None:
            means = replace(means, threads=means.threads - 1)
        elif means.batch > 1 and options.batch is None:
            means = replace(means, batch=means.batch // 2)
        else:
            needed, allowed, of = short
            raise PlanError(
                f"up to {needed / 1e9:.2f} GB of {of} {allowed / 1e9:.2f}",
                "use a shorter --length, --qep-alpha 0, or allow more",
            )
        cost = cost_of(means)
    return means, cost


def _limits(options: "Options", means: Means) -> list[tuple[Callable[[Estimate], int], int, str]]:
    """What must not be exceeded: a number of bytes, their limit, and how a refusal names both."""
    limits: list[tuple[Callable[[Estimate], int], int, str]] = []
    if options.max_memory is not None:
        limits.append((lambda cost: cost.memory_bytes, options.max_memory, "memory are needed, --max-memory allows"))
    if not means.gpu:
        return limits
    if options.max_gpu_memory is not None:
        limit = options.max_gpu_memory
        limits.append((lambda cost: cost.gpu_bytes, limit, "GPU memory are needed, --max-gpu-memory allows"))
    from llmcompress.hardware import gpu_memory

    memory = gpu_memory()
    if memory is not None:
        limits.append((lambda cost: cost.gpu_bytes, memory.total, "GPU memory are needed, the GPU has"))
    return limits


def _short(cost: Estimate, limits: list[tuple[Callable[[Estimate], int], int, str]]) -> tuple[float, int, str] | None:
    """Bytes needed and allowed, and what they are, for the first limit that is exceeded."""
    for of, allowed, words in limits:
        if of(cost) * MARGIN > allowed:
            return of(cost) * MARGIN, allowed, words
    return None


def usual_means(options: "Options", length: int) -> Means:
    """What is asked for, or else as much as is fastest, whatever memory it takes."""
    gpu = on_gpu(options.device)
    batch = options.batch or max(1, (_GPU_TOKENS if gpu else _BATCH_TOKENS) // length)
    dtype = _compute_dtype(options.compute_dtype, gpu)
    threads = 1 if gpu else usual_threads()  # a GPU is kept busy by one
    return Means(dtype, batch, options.threads or threads, gpu)


def usual_threads() -> int:
    """As many as torch would use."""
    import torch

    return torch.get_num_threads()


def on_gpu(device: str) -> bool:
    """Whether layers run on a GPU where the option is `device`."""
    import torch

    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def _compute_dtype(asked: str, gpu: bool) -> str:
    """The type layers run in: bfloat16 where the processor multiplies it fast, else float32."""
    if asked != "auto":
        return asked
    from llmcompress.hardware import quick_type

    return str(quick_type("cuda" if gpu else "cpu")).removeprefix("torch.")
