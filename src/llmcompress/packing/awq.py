"""Eight 4-bit values to a word in the order of AWQ's GEMM kernels: nibble i holds value ORDER[i] of the eight."""

from torch import Tensor

from llmcompress.packing.nibbles import pack_nibbles, unpack_nibbles

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_awq(values: Tensor) -> Tensor:
    """Values [rows, count], whole numbers in 0 ... 15, to int32 words [rows, count/8]; count is a multiple of eight."""
    return pack_nibbles(values, ORDER)


def unpack_awq(words: Tensor) -> Tensor:
    """Inverse of `pack_awq`: int32 words [rows, count/8] to values uint8 [rows, count]."""
    return unpack_nibbles(words, ORDER)
