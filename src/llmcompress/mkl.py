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
    """total [m, n] float32 += left^T right of bfloat16; left [k, m], right [k, n]; the rows of total are contiguous.

    ValueError for other shapes, types or strides of total.
    """
    (rows, columns), depth = total.shape, left.shape[0]
    shapes = (left.shape, right.shape) == ((depth, rows), (depth, columns))
    types = (total.dtype, left.dtype, right.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    if not (shapes and types and _has_rows(total)):
        raise ValueError(f"left {left.shape}, right {right.shape} and total {total.shape} make no product of bfloat16")
    left, right = (part if _has_rows(part) else part.contiguous() for part in (left, right))
    _routine()(
        *(_ROW_MAJOR, _TRANSPOSED, _PLAIN, rows, columns, depth),
        *(1.0, left.data_ptr(), _apart(left), right.data_ptr(), _apart(right)),
        *(1.0, total.data_ptr(), _apart(total)),
    )


def _has_rows(matrix: Tensor) -> bool:
    """Whether each row of a matrix is contiguous, and none overlaps the next."""
    (rows, columns), (down, along) = matrix.shape, matrix.stride()
    return (columns <= 1 or along == 1) and (rows <= 1 or down >= columns)


def _apart(matrix: Tensor) -> int:
    """How far apart rows begin; what torch says of a single row may be anything."""
    rows, columns = matrix.shape
    return max(matrix.stride(0) if rows > 1 else 0, columns, 1)
