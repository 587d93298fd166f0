"""The means of a run: the type its layers run in, windows in a batch, threads; as many as the memory allowed is for."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from llmcompress.engine.plan.estimate import Estimate
from llmcompress.engine.plan.options import Resources
from llmcompress.errors import PlanError

if TYPE_CHECKING:
    from llmcompress.engine.plan.options import Options

MARGIN = 1.1  # by which memory may exceed its estimate
_BATCH_TOKENS = 1024  # run through a layer at once: on a processor, what stays in the caches is fastest
_GPU_TOKENS = 8192  # on a GPU: products of so many rows fill it


def choose_resources(
    options: "Options", length: int, cost_of: Callable[[Resources], Estimate]
) -> tuple[Resources, Estimate]:
    """Resources for windows of `length` tokens, and what the run then takes by `cost_of`.

    Where the memory is bounded and more do not fit, there are fewer threads and smaller batches; PlanError if even the
    fewest do not. A GPU bounds its memory by itself: the batch follows from all it has, whoever uses it now.
    """
    resources = usual_resources(options, length)
    cost = cost_of(resources)
    limits = _limits(options, resources)
    while short := _short(cost, limits):
        if resources.threads > 1 and options.threads is None:
            resources = replace(resources, threads=resources.threads - 1)
        elif resources.batch > 1 and options.batch is None:
            resources = replace(resources, batch=resources.batch // 2)
        else:
            needed, allowed, of = short
            raise PlanError(
                f"up to {needed / 1e9:.2f} GB of {of} {allowed / 1e9:.2f}",
                "use a shorter --length, --qep-alpha 0, or allow more",
            )
        cost = cost_of(resources)
    return resources, cost


def _limits(options: "Options", resources: Resources) -> list[tuple[Callable[[Estimate], int], int, str]]:
    """What must not be exceeded: a number of bytes, their limit, and how a refusal names both."""
    limits: list[tuple[Callable[[Estimate], int], int, str]] = []
    if options.max_memory is not None:
        limits.append((lambda cost: cost.memory_bytes, options.max_memory, "memory are needed, --max-memory allows"))
    if not resources.gpu:
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


def usual_resources(options: "Options", length: int) -> Resources:
    """What is asked for, or else as much as is fastest, whatever memory it takes."""
    gpu = on_gpu(options.device)
    batch = options.batch or max(1, (_GPU_TOKENS if gpu else _BATCH_TOKENS) // length)
    dtype = _compute_dtype(options.compute_dtype, gpu)
    threads = 1 if gpu else usual_threads()  # a GPU is kept busy by one
    return Resources(dtype, batch, options.threads or threads, gpu)


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
