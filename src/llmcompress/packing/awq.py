"""Eight 4-bit values to a word in the order of AWQ's GEMM kernels: nibble i holds value ORDER[i] of the eight."""

import torch
from torch import Tensor

from llmcompress.packing.bits import pack, unpack

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BITS = 4


def pack_awq(values: Tensor) -> Tensor:
    """Values [rows, count], whole numbers in 0 ... 15, to int32 words [rows, count/8]; count is a multiple of eight."""
    return pack(_shuffled(values, torch.tensor(ORDER)), BITS)


def unpack_awq(words: Tensor) -> Tensor:
    """Inverse of `pack_awq`: int32 words [rows, count/8] to values uint8 [rows, count]."""
    return _shuffled(unpack(words, BITS, words.shape[1] * len(ORDER)), torch.argsort(torch.tensor(ORDER)))


def _shuffled(values: Tensor, order: Tensor) -> Tensor:
    """Every eight values of a row in another order."""
    rows, count = values.shape
    return values.reshape(rows, -1, len(ORDER))[:, :, order].reshape(rows, count)
