"""What the machine is good at, and how much memory its GPU has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

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
    """Within, products of float32 round no input, whatever the environment asks for (TF32 keeps 11 bits).

    The switches are those of the process: all of its threads multiply exactly meanwhile.
    """
    backend = torch.backends.cuda.matmul  # by the older of its two switches: newer ones alone do not undo that one
    before = backend.allow_tf32
    backend.allow_tf32 = False
    try:
        with _products_on_processor("ieee"):
            yield
    finally:
        backend.allow_tf32 = before


def rounded_float32() -> AbstractContextManager[None]:
    """Within, a processor's products of float32 may round their inputs to bfloat16, where that is faster.

    In all threads of the process: for work beside which no other is done.
    """
    return _products_on_processor("bf16")


def rounds_float32(device: torch.device) -> bool:
    """Whether `rounded_float32` makes products on a device faster."""
    known = hasattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision")
    return known and device.type == "cpu" and quick_type(device) == torch.bfloat16


@contextmanager
def _products_on_processor(precision: str) -> Iterator[None]:
    backend: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if not hasattr(backend, "fp32_precision"):  # before torch 2.9 products are exact
        yield
        return
    before = backend.fp32_precision
    backend.fp32_precision = precision
    try:
        yield
    finally:
        backend.fp32_precision = before
