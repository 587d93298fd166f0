"""vLLM for CPUs in an environment of its own, which clashes with our dependencies."""

from dataclasses import dataclass

import torch
from other_environment import asked

IDS = torch.randint(5, 96, (2, 40), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Found:
    """What vLLM made of a checkpoint. values: logarithms of probabilities [samples, length - 1, vocabulary].

    error: what it said, empty where it ran the checkpoint. verdicts: by kernel of GPUs, its answers. scales: by name
    those under which it caches keys and values, 1 where it has none.
    """

    values: torch.Tensor | None
    error: str
    verdicts: dict[str, list[str]]
    scales: dict[str, float]


def found_by_vllm(paths, folder, arguments=()):
    """What vLLM makes of each checkpoint, in one process."""
    said, values = asked("vllm", IDS, folder, paths, arguments, timeout=3600)
    return {
        path: Found(
            values.get(str(path)),
            said["errors"].get(str(path), ""),
            said["verdicts"][str(path)],
            said["scales"].get(str(path), {}),
        )
        for path in paths
    }
