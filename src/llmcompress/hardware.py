"""What the machine is good at, and how much memory its GPU has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from llmcompress.lazy import torch


class GpuMemory(NamedTuple):
    """Bytes of a GPU."""

    free: int
    total: int


MORE_ON_GPU = 64  # times as much at once there: a call costs as much as the arithmetic on some millions of numbers


def quick_type(device: torch.device | str) -> torch.dtype:
    """The type in which a device multiplies matrices fastest of those that have the range of float32."""
    if (
        torch.device(device).type != "cpu"
        or torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
    ):
        return torch.bfloat16
    return torch.float32


def at_once(like: torch.Tensor, numbers: int) -> int:
    """How many to work on at once where a tensor is: `numbers` that fit a processor's cache, or what fills a GPU."""
    return numbers * MORE_ON_GPU if like.is_cuda else numbers


def gpu_memory(device: torch.device | None = None) -> GpuMemory | None:
    """Of a GPU, the current one if none is named; None where there is none."""
    return GpuMemory(*torch.cuda.mem_get_info(device)) if torch.cuda.is_available() else None


@contextmanager
def exact_float32() -> Iterator[None]:
    """Within, products of float32 on a GPU round no input, whatever the environment asks for (TF32 keeps 11 bits)."""
    backend = torch.backends.cuda.matmul  # by the older of its two switches: newer ones alone do not undo that one
    before = backend.allow_tf32
    backend.allow_tf32 = False
    try:
        yield
    finally:
        backend.allow_tf32 = before
