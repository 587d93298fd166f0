"""Eight 4-bit values to a word, nibble i holding value order[i] of the eight."""

from collections.abc import Sequence

import torch
from torch import Tensor

from llmcompress.packing.bits import pack, unpack

BITS = 4


def pack_nibbles(values: Tensor, order: Sequence[int]) -> Tensor:
    """Values [rows, count], whole numbers in 0 ... 15, to int32 words [rows, count/8]; count is a multiple of eight."""
    return pack(_shuffled(values, torch.tensor(order)), BITS)


def unpack_nibbles(words: Tensor, order: Sequence[int]) -> Tensor:
    """Inverse of `pack_nibbles`: int32 words [rows, count/8] to values uint8 [rows, count]."""
    return _shuffled(unpack(words, BITS, words.shape[1] * len(order)), torch.argsort(torch.tensor(order)))


def _shuffled(values: Tensor, order: Tensor) -> Tensor:
    """Every eight values of a row in another order."""
    rows, count = values.shape
    return values.reshape(rows, count // len(order), len(order))[:, :, order].reshape(rows, count)
