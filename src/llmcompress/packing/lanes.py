"""Eight 4-bit values to a word whose bytes are lanes: byte i holds value i in its low bits, 4 + i in its high ones.

One mask gives four values in order, each in a byte of its own, where a kernel goes on with arithmetic on all four at
once (QServe, arXiv:2405.04532, section 5.2).
"""

from torch import Tensor

from llmcompress.packing.nibbles import pack_nibbles, unpack_nibbles

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def pack_lanes(values: Tensor) -> Tensor:
    """Values [rows, count], whole numbers in 0 ... 15, to int32 words [rows, count/8]; count is a multiple of eight."""
    return pack_nibbles(values, ORDER)


def unpack_lanes(words: Tensor) -> Tensor:
    """Inverse of `pack_lanes`: int32 words [rows, count/8] to values uint8 [rows, count]."""
    return unpack_nibbles(words, ORDER)
