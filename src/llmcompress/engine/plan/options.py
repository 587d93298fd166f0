"""What a run may use: places and limits as the user gave them, and what was chosen within them."""

from dataclasses import dataclass
from pathlib import Path

FETCHED = 2  # batches on their way to a GPU


@dataclass(frozen=True)
class Options:
    """Choices of a run that do not belong into a recipe: where it reads and writes, and what it may use."""

    out: Path | None = None
    work: Path | None = None
    device: str = "auto"
    compute_dtype: str = "auto"
    batch: int | None = None
    threads: int | None = None
    overwrite: bool = False
    keep_work: bool = False
    trust_remote_code: bool = False
    target: str | None = None
    tp: int = 1
    repair: bool = False
    max_memory: int | None = None
    max_gpu_memory: int | None = None
    stats: Path | None = None


@dataclass(frozen=True)
class Resources:
    """What the memory of a run depends on beside the model: type of its layers, windows in a batch, threads.

    gpu: whether layers run, and matrices are solved, on a GPU.
    """

    dtype: str
    batch: int
    threads: int
    gpu: bool = False
