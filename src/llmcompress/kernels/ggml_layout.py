"""Blocks of GGML's types as `csrc/ggml.cuh` reads them: the file's bits, where the lanes of a warp want them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, unflatten
from torch.nn.functional import pad

from llmcompress.grids.blocks import BlockSpec
from llmcompress.kernels.compile_errors import TakesNotError
from llmcompress.kernels.tensor_checks import ceil
from llmcompress.packing.bits import pack
from llmcompress.packing.ggml import unpack
from llmcompress.packing.nibbles import pack_nibbles

TYPES = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")
ROWS, INPUTS = 16, 256  # of a record
_PAIRS = (0, 2, 4, 6, 1, 3, 5, 7)  # two neighbours lie 16 bits apart
_AT_ONCE = 1 << 23  # weights laid out at once
_HEADS = {"Q4_K": slice(0, 16), "Q5_K": slice(0, 16), "Q6_K": slice(192, 208), "Q8_0": slice(0, 2)}  # of a block
_UNITS = slice(208, 210)  # of a block of Q6_K


@dataclass(frozen=True)
class BlockWeight:
    """records uint8 [ceil(out / 16), ceil(in / 256), bytes of 16 rows by 256 inputs], zeros after the last."""

    records: Tensor
    spec: BlockSpec
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.records.nbytes

    def rows(self, begin: int, end: int) -> "BlockWeight":
        """Some output rows, the first of them a multiple of 16; nothing is copied."""
        end = min(end, self.shape[0])
        assert begin % ROWS == 0
        records = self.records[begin // ROWS : ceil(end, ROWS)]
        return replace(self, records=records, shape=(end - begin, self.shape[1]))


def block_weight(data: Tensor, spec: BlockSpec) -> BlockWeight:
    """Rows uint8 [out, bytes] as a GGUF file has them; TakesNotError for types that no kernel reads."""
    if spec.name not in TYPES:
        raise TakesNotError(f"kernels read blocks of {', '.join(TYPES)}, not {spec.name}")
    rows, width = data.shape[0], data.shape[1] // spec.block_bytes * spec.block_size
    step = max(1, _AT_ONCE // max(1, width) // ROWS) * ROWS
    parts = [_records(data[at : at + step], spec) for at in range(0, max(rows, 1), step)]
    return BlockWeight(torch.cat(parts), spec, (rows, width))


def _records(data: Tensor, spec: BlockSpec) -> Tensor:
    """Records of some rows, uint8 [records of rows, records of inputs, bytes]."""
    codes = unpack(data, spec).codes
    owned = _owned(pad(codes, (0, -codes.shape[1] % INPUTS, 0, -codes.shape[0] % ROWS)), spec.group_size)
    count = INPUTS // spec.block_size
    blocks = data.view(data.shape[0], -1, spec.block_bytes)
    blocks = pad(blocks, (0, 0, 0, -blocks.shape[1] % count, 0, -blocks.shape[0] % ROWS))
    parts = [_bytes(owned) if spec.bits == 8 else _nibbles(owned & 15)]
    if spec.bits == 5:
        parts.append(_fifth_bits(owned >> 4))
    if spec.bits == 6:
        parts.append(_top_bits(owned >> 4))
    parts.append(_by_record(blocks[..., _HEADS[spec.name]], count).flatten(2))
    if spec.bits == 6:
        parts.append(unflatten(_by_record(blocks[..., _UNITS], count), 2, (2, 8)).transpose(2, 3).flatten(2))
    return torch.cat(parts, dim=-1)


def _owned(codes: Tensor, group_size: int) -> Tensor:
    """Codes [out, in] as [row records, records, chunk, g, t, half, 8]: what lane 4g + t has of rows 8 half + g."""
    rows, records = codes.shape[0] // ROWS, codes.shape[1] // INPUTS
    if group_size == 16:
        parts = codes.view(rows, 2, 8, records, 8, 2, 4, 4)
        return parts.permute(0, 3, 4, 2, 6, 1, 5, 7).flatten(-2)
    return codes.view(rows, 2, 8, records, 8, 4, 8).permute(0, 3, 4, 2, 5, 1, 6)


def _nibbles(owned: Tensor) -> Tensor:
    """A word for each row and chunk; a piece of 16 bytes for each lane and two chunks."""
    words = pack_nibbles(owned.reshape(-1, 512), _PAIRS).view(owned.shape[:-1])
    return _flat(unflatten(words, 2, (4, 2)).permute(0, 1, 2, 4, 5, 3, 6))


def _bytes(owned: Tensor) -> Tensor:
    """Two words for each row and chunk, with bytes of neighbours 16 bits apart; a piece for each lane and chunk."""
    return _flat(unflatten(owned, -1, (2, 2, 2)).transpose(-1, -2))


def _fifth_bits(bits: Tensor) -> Tensor:
    """A word for each lane and two chunks, whose bit 16 e + 8 chunk + 4 half + i is that of code 2i + e."""
    split = unflatten(unflatten(bits, 2, (4, 2)), -1, (4, 2))  # row records, records, 4, chunk, g, t, half, i, e
    words = pack(split.permute(0, 1, 4, 5, 2, 8, 3, 6, 7).reshape(bits.shape[0], -1), 1)
    return _flat(words.view(*bits.shape[:2], -1))


def _top_bits(pairs: Tensor) -> Tensor:
    """A word for each lane and chunk, whose bits 16 e + 8 half + 2i and the next are those of code 2i + e."""
    split = unflatten(unflatten(pairs, 2, (2, 4)), -1, (4, 2))  # row records, records, 2, chunk of 4, g, t, half, i, e
    words = pack(split.permute(0, 1, 2, 4, 5, 3, 8, 6, 7).reshape(pairs.shape[0], -1), 2)
    return _flat(words.view(*pairs.shape[:2], -1))


def _by_record(parts: Tensor, per_record: int) -> Tensor:
    """Bytes of blocks [out, blocks, bytes] as [row records, records, 16, bytes of all blocks of a record]."""
    return unflatten(unflatten(parts, 0, (-1, ROWS)), 2, (-1, per_record)).transpose(1, 2).flatten(3)


def _flat(words: Tensor) -> Tensor:
    """The bytes of each record."""
    return words.contiguous().view(*words.shape[:2], -1).view(torch.uint8)
