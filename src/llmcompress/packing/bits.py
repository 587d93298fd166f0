"""Little-endian bit streams in 32-bit words: value i of a row occupies bits [i*b, (i+1)*b) of the stream.

Bit t of the stream is bit t mod 32 of word t // 32, and bit t mod 8 of byte t // 8.

The fewest values that fill whole bytes are packed by one loop over their places, whatever the width b from 1 to 8 bits:

    b = 3   byte 0: v0 v1 and the low 2 bits of v2 | byte 1: the high bit of v2, v3 v4 and the low bit of v5 | ...
"""

from math import gcd

import torch
from torch import Tensor

_CHUNK = 1 << 20  # codes packed at once, whose temporaries take up to four bytes each


def words_for(count: int, bits: int) -> int:
    """32-bit words that `count` values of `bits` bits need."""
    return (count * bits + 31) // 32


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, count], whole numbers in 0 ... 2^bits - 1, to int32 words [rows, ceil(count*bits/32)]."""
    step = max(1, _CHUNK // max(codes.shape[1], 1))
    return torch.cat([_pack(codes[start : start + step], bits) for start in range(0, max(codes.shape[0], 1), step)])


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of `pack`: int32 words [rows, ceil(count*bits/32)] to codes uint8 [rows, count]."""
    step = max(1, _CHUNK // max(count, 1))
    parts = [_unpack(words[start : start + step], bits, count) for start in range(0, max(words.shape[0], 1), step)]
    return torch.cat(parts)


def _unit(bits: int) -> tuple[int, int]:
    """The fewest values that fill whole bytes, and those bytes."""
    shared = gcd(8, bits)
    return 8 // shared, bits // shared


def _pack(codes: Tensor, bits: int) -> Tensor:
    rows, count = codes.shape
    values, size = _unit(bits)
    words = codes.new_zeros(rows, words_for(count, bits), dtype=torch.int32)
    units = -(-4 * words.shape[1] // size)
    padded = codes.new_zeros(rows, units * values, dtype=torch.uint8)
    padded[:, :count] = codes
    packed = padded.new_zeros(rows, units * size)
    for place in range(values):
        byte, shift = divmod(place * bits, 8)
        value = padded[:, place::values]
        packed[:, byte::size] |= value << shift
        if shift + bits > 8:
            packed[:, byte + 1 :: size] |= value >> (8 - shift)
    words.view(torch.uint8).copy_(packed[:, : 4 * words.shape[1]])
    return words


def _unpack(words: Tensor, bits: int, count: int) -> Tensor:
    rows = words.shape[0]
    values, size = _unit(bits)
    units = -(-count // values)
    packed = words.new_zeros(rows, units * size, dtype=torch.uint8)
    stored = words.contiguous().view(torch.uint8)[:, : units * size]
    packed[:, : stored.shape[1]] = stored
    codes = packed.new_empty(rows, units * values)
    for place in range(values):
        byte, shift = divmod(place * bits, 8)
        value = packed[:, byte::size] >> shift
        if shift + bits > 8:
            value |= packed[:, byte + 1 :: size] << (8 - shift)
        codes[:, place::values] = value & ((1 << bits) - 1)
    return codes[:, :count].contiguous()
