"""What a user allows a run: places, limits and choices that do not belong into a recipe."""

from dataclasses import dataclass
from pathlib import Path

from llmcompress.engine.targets.machine import Machine


@dataclass(frozen=True)
class Options:
    """Choices of a run that do not belong into a recipe: where it reads and writes, and what it may use.

    Named as the options of the command line, whose help explains them; `max_memory` and `max_gpu_memory` are in bytes.
    """

    out: Path | None = None
    work: Path | None = None
    device: str = "auto"
    compute_dtype: str = "auto"
    batch: int | None = None
    threads: int | None = None
    overwrite: bool = False
    keep_work: bool = False
    restart: bool = False
    trust_remote_code: bool = False
    target: str | None = None
    tp: int = 1
    gpu: str | None = None
    repair: bool = False
    max_memory: int | None = None
    max_gpu_memory: int | None = None
    stats: Path | None = None
    adapter: Path | None = None

    @property
    def machine(self) -> Machine:
        """What the target runs on; RecipeError for an unknown GPU."""
        return Machine.named(self.tp, self.gpu)
