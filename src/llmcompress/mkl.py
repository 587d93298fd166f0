"""Products of bfloat16 that are summed in float32, by the MKL inside torch.

On processors torch returns such products as bfloat16 alone. MKL's `cblas_gemm_bf16bf16f32` (oneMKL's reference,
BLAS-like extensions) adds them to float32, and torch's library exports it. With AMX it takes a fifth of float32's time.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112  # as CBLAS numbers them


@cache
def _routine() -> Any:
    """MKL's routine, or None where torch was built without it."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        routine = ctypes.CDLL(str(library)).cblas_gemm_bf16bf16f32
    except (OSError, AttributeError):
        return None
    size, factor, matrix = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    routine.argtypes = [*[size] * 6, factor, matrix, size, matrix, size, factor, matrix, size]
    routine.restype = None
    return routine


@cache
def adds_bfloat16() -> bool:
    """Whether `add_product` works here, and is the fastest way to add up products of bfloat16."""
    return torch.cpu._is_amx_tile_supported() and _routine() is not None


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [m, n] float32 += left^T right; left [k, m] and right [k, n] are bfloat16, and all rows contiguous.

    ValueError for other shapes, types or strides.
    """
    rows, columns = total.shape
    shapes = (left.shape, right.shape) == ((left.shape[0], rows), (left.shape[0], columns))
    types = (total.dtype, left.dtype, right.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    if not (shapes and types and all(part.stride(1) == 1 for part in (total, left, right))):
        raise ValueError(f"left {left.shape}, right {right.shape} and total {total.shape} make no product of bfloat16")
    _routine()(
        *(_ROW_MAJOR, _TRANSPOSED, _PLAIN, rows, columns, left.shape[0]),
        *(1.0, left.data_ptr(), left.stride(0), right.data_ptr(), right.stride(0)),
        *(1.0, total.data_ptr(), total.stride(0)),
    )
