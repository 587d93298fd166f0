"""What all kernels ask of tensors, and sums of the sizes that they run in."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from llmcompress.kernels.compile_errors import TakesNotError

MOST = (1 << 31) - 1  # what kernels count with
MOST_BLOCKS = 65535  # of channels: in the second dimension of a grid
_LARGE = dict.fromkeys(("sm_90", "sm_100", "sm_103", "sm_110"), 227 << 10)
SHARED = {"sm_80": 163 << 10, "sm_87": 163 << 10, **_LARGE}  # bytes a block may have
RESERVED = 1 << 10  # that each block takes besides
LEAST_SHARED = 99 << 10  # on all others from sm_80


def bfloat(dtype: torch.dtype) -> int:
    """1 for bfloat16, 0 for float16; TakesNotError for any other type."""
    if dtype not in (torch.float16, torch.bfloat16):
        raise TakesNotError(f"kernels take float16 and bfloat16, not {str(dtype).removeprefix('torch.')}")
    return int(dtype == torch.bfloat16)


def ceil(value: int, by: int) -> int:
    """value / by, rounded up."""
    return -(-value // by)


def up(value: int, to: int) -> int:
    """value rounded up to a multiple."""
    return ceil(value, to) * to


def padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """A matrix [rows', columns'] with zeros after it, contiguous; rows and columns are multiples to pad to."""
    below, beside = up(matrix.shape[0], rows) - matrix.shape[0], up(matrix.shape[1], columns) - matrix.shape[1]
    return pad(matrix, (0, beside, 0, below)).contiguous()


def shared_limit(architecture: str) -> int:
    """Bytes of shared memory that a block may have."""
    return SHARED.get(architecture, LEAST_SHARED)


def begins_early(architecture: str) -> bool:
    """Whether a launch may begin before the one before it has ended, from compute capability 9.0 on."""
    return int(architecture.removeprefix("sm_")) >= 90


def rows_aligned(x: Tensor) -> bool:
    """Whether every row of x [tokens, width] of 16-bit floats begins at a multiple of 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0


def check_inputs(x: Tensor, width: int) -> Tensor:
    """x [tokens, width] with elements of a row one after another; TakesNotError for what no kernel takes."""
    bfloat(x.dtype)
    if x.dim() != 2 or x.shape[1] != width:
        raise TakesNotError(f"inputs of shape {list(x.shape)} do not fit a weight with {width} inputs")
    if x.shape[0] > MOST or x.stride(0) > MOST:
        raise TakesNotError(f"kernels take up to {MOST} tokens and elements between two of them")
    return x if x.stride(1) == 1 else x.contiguous()


def optional(tensor: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of a type, or none, which kernels get as a null pointer."""
    if tensor is None:
        return torch.empty(0, dtype=dtype, device=like.device)
    return tensor.to(dtype).contiguous()


def check_channels(tensor: Tensor, channels: int, name: str) -> None:
    """TakesNotError unless there is one value for each output channel."""
    if tensor.shape != (channels,):
        raise TakesNotError(f"{name} of shape {list(tensor.shape)} does not fit {channels} output channels")
