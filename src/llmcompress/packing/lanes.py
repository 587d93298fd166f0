"""Eight 4-bit values to a word whose bytes are lanes: byte i holds value i in its low bits, 4 + i in its high ones.

One mask gives four values in order, each in a byte of its own, where a kernel goes on with arithmetic on all four at
once (QServe, arXiv:2405.04532, section 5.2).
"""

import torch
from torch import Tensor

from llmcompress.packing.bits import pack, unpack

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
BITS = 4


def pack_lanes(values: Tensor) -> Tensor:
    """Values [rows, count], whole numbers in 0 ... 15, to int32 words [rows, count/8]; count is a multiple of eight."""
    return pack(_shuffled(values, torch.tensor(ORDER)), BITS)


def unpack_lanes(words: Tensor) -> Tensor:
    """Inverse of `pack_lanes`: int32 words [rows, count/8] to values uint8 [rows, count]."""
    return _shuffled(unpack(words, BITS, words.shape[1] * len(ORDER)), torch.argsort(torch.tensor(ORDER)))


def _shuffled(values: Tensor, order: Tensor) -> Tensor:
    """Every eight values of a row in another order."""
    rows, count = values.shape
    return values.reshape(rows, -1, len(ORDER))[:, :, order].reshape(rows, count)
