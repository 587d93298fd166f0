"""The resources of a run: the type its layers run in, windows in a batch, threads; fewer where memory is bounded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from llmcompress.engine.plan.memory_model import MARGIN, Device, MemoryModel
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import PlanError
from llmcompress.recipe import Calibration

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_BATCH_TOKENS = 1024  # run through a layer at once: on a processor, what stays in the caches is fastest
_GPU_TOKENS = 8192  # on a GPU: products of so many rows fill it


@dataclass(frozen=True)
class Resources:
    """What the memory of a run depends on beside the model: type of its layers, windows in a batch, threads.

    gpu: whether layers run, and matrices are solved, on a GPU. experts_on_demand: whether matrices of experts are read
    from disk for every product, since those of a layer do not fit into memory together. keeps_statistics: whether
    those of a layer are held until it is done, for other runs.
    """

    dtype: str
    batch: int
    threads: int
    gpu: bool = False
    experts_on_demand: bool = False
    keeps_statistics: bool = False

    @property
    def item_bytes(self) -> int:
        """Bytes of a number in the type that layers run in."""
        return ITEM_BYTES[self.dtype]


class Limit(NamedTuple):
    """Bytes of a device that must not be exceeded. words: between bytes needed and bytes allowed in a refusal."""

    device: Device
    allowed: int
    words: str


def choose_resources(
    options: Options, text: Calibration, memory_of: Callable[[Resources], MemoryModel], experts: bool
) -> Resources:
    """Resources of a run over windows of a text, whose memory fits what options and the GPU allow.

    A GPU bounds its memory by itself: the batch follows from all it has, whoever uses it now. PlanError as `bounded`.

    experts: whether there are experts that could be read on demand. They are, where a layer of them does not fit, and
    then every batch reads them all: so batches are as large as fits.
    """
    resources = usual_resources(options, text.length)
    limits = host_limits(options.max_memory)
    if resources.gpu:
        limits += _gpu_limits(options.max_gpu_memory)
    free = options.threads is None, options.batch is None
    hint = "use a shorter --length, --qep-alpha 0, or allow more"
    try:
        return bounded(resources, limits, memory_of, free, hint)
    except PlanError:
        if resources.gpu or not experts:
            raise
    batch = options.batch or max(resources.batch, -(-text.samples // resources.threads))
    return bounded(replace(resources, batch=batch, experts_on_demand=True), limits, memory_of, free, hint)


def bounded(
    resources: Resources,
    limits: Sequence[Limit],
    memory_of: Callable[[Resources], MemoryModel],
    free: tuple[bool, bool],
    hint: str = "use a shorter --length, or allow more",
) -> Resources:
    """Resources whose memory, with a margin, keeps within limits: fewer threads, then smaller batches.

    free: whether threads, and whether batches, may be chosen. PlanError with a hint where even the fewest take more.
    """
    threads, batches = free
    while limits and (excess := _excess(memory_of(resources), limits)):
        if resources.threads > 1 and threads:
            resources = replace(resources, threads=resources.threads - 1)
        elif resources.batch > 1 and batches:
            resources = replace(resources, batch=resources.batch // 2)
        else:
            raise PlanError(excess, hint)
    return resources


def host_limits(max_memory: int | None) -> list[Limit]:
    """The limit of main memory, if there is one."""
    return [] if max_memory is None else [Limit("host", max_memory, "memory are needed, --max-memory allows")]


def _gpu_limits(max_gpu_memory: int | None) -> list[Limit]:
    from llmcompress.hardware import gpu_memory

    memory = gpu_memory()
    limits = []
    if max_gpu_memory is not None:
        limits.append(Limit("gpu", max_gpu_memory, "GPU memory are needed, --max-gpu-memory allows"))
    if memory is not None:
        limits.append(Limit("gpu", memory.total, "GPU memory are needed, the GPU has"))
    return limits


def _excess(memory: MemoryModel, limits: Sequence[Limit]) -> str | None:
    """Bytes needed and bytes allowed, in words, of the first limit that is exceeded."""
    for limit in limits:
        needed = memory.peak(limit.device) * MARGIN
        if needed > limit.allowed:
            return f"up to {needed / 1e9:.2f} GB of {limit.words} {limit.allowed / 1e9:.2f}"
    return None


def usual_resources(options: Options, length: int) -> Resources:
    """What is asked for, or else as much as is fastest, whatever memory it takes."""
    gpu = on_gpu(options.device)
    batch = options.batch or max(1, (_GPU_TOKENS if gpu else _BATCH_TOKENS) // length)
    dtype = _compute_dtype(options.compute_dtype, gpu)
    threads = 1 if gpu else usual_threads()  # a GPU is kept busy by one
    keeps = options.stats is not None
    return Resources(dtype, batch, options.threads or threads, gpu, keeps_statistics=keeps)


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
