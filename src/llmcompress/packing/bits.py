"""Little-endian bit streams in 32-bit words: value i of a row occupies bits [i*b, (i+1)*b) of the stream.

Bit t of the stream is bit t mod 32 of word t // 32.

Every 32 values fill exactly b words, whatever the width b, so one loop over 32 places serves 1 to 8 bits:

    b = 3   word 0: v0 v1 ... v9 and the low 2 bits of v10 | word 1: the high bit of v10, v11 ... | ...
"""

import torch
from torch import Tensor

_CHUNK = 1 << 20  # codes packed at once: the int64 temporaries take 16 bytes for each


def words_for(count: int, bits: int) -> int:
    """32-bit words that `count` values of `bits` bits need."""
    return (count * bits + 31) // 32


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, count], whole numbers in 0 ... 2^bits - 1, to int32 words [rows, ceil(count*bits/32)]."""
    step = max(1, _CHUNK // max(codes.shape[1], 1))
    return torch.cat([_pack(codes[start : start + step], bits) for start in range(0, max(codes.shape[0], 1), step)])


def _pack(codes: Tensor, bits: int) -> Tensor:
    rows, count = codes.shape
    if 8 % bits == 0:  # whole values in each byte
        per = 8 // bits
        padded = codes.new_zeros(rows, 4 * words_for(count, bits) * per, dtype=torch.uint8)
        padded[:, :count] = codes
        packed = padded[:, ::per].clone()
        for place in range(1, per):
            packed |= padded[:, place::per] << (place * bits)
        return packed.view(torch.int32)
    blocks = (count + 31) // 32
    padded = torch.zeros(rows, blocks * 32, dtype=torch.int64, device=codes.device)
    padded[:, :count] = codes
    padded = padded.view(rows, blocks, 32)
    words = torch.zeros(rows, blocks, bits + 1, dtype=torch.int64, device=codes.device)
    for place in range(32):
        word, shift = divmod(place * bits, 32)
        shifted = padded[:, :, place] << shift
        words[:, :, word] |= shifted & 0xFFFFFFFF
        words[:, :, word + 1] |= shifted >> 32
    flat = words[:, :, :bits].reshape(rows, blocks * bits)[:, : words_for(count, bits)]
    return torch.where(flat >= 1 << 31, flat - (1 << 32), flat).to(torch.int32)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of `pack`: int32 words [rows, ceil(count*bits/32)] to codes uint8 [rows, count]."""
    step = max(1, _CHUNK // max(count, 1))
    parts = [_unpack(words[start : start + step], bits, count) for start in range(0, max(words.shape[0], 1), step)]
    return torch.cat(parts)


def _unpack(words: Tensor, bits: int, count: int) -> Tensor:
    rows = words.shape[0]
    if 8 % bits == 0:
        packed = words.contiguous().view(torch.uint8)
        places = [(packed >> (place * bits)) & ((1 << bits) - 1) for place in range(8 // bits)]
        return torch.stack(places, dim=-1).view(rows, -1)[:, :count].contiguous()
    blocks = (count + 31) // 32
    wide = torch.zeros(rows, blocks * bits + 1, dtype=torch.int64, device=words.device)
    wide[:, : words.shape[1]] = words.to(torch.int64) & 0xFFFFFFFF
    codes = torch.empty(rows, blocks, 32, dtype=torch.uint8, device=words.device)
    mask = (1 << bits) - 1
    for place in range(32):
        word, shift = divmod(place * bits, 32)
        low = wide[:, word : word + (blocks - 1) * bits + 1 : bits]
        high = wide[:, word + 1 : word + 1 + (blocks - 1) * bits + 1 : bits]
        codes[:, :, place] = (((low >> shift) | (high << (32 - shift))) & mask).to(torch.uint8)
    return codes.view(rows, blocks * 32)[:, :count]
