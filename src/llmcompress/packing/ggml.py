"""Bytes of GGML's block types: the layout of a quantised tensor's rows in a GGUF file.

Every type is described by where the bits of its codes, multiples and minima lie; packing and unpacking both follow the
description. Source: the block structures of GGML, as GGUF files hold them (little-endian).
"""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from llmcompress.grids.base import Spec
from llmcompress.grids.blocks import BLOCK_TYPES, BlockGrid, BlockSpec, whole_blocks
from llmcompress.grids.coded import Coded
from llmcompress.grids.grid_type import type_of

_CHUNK = 1 << 19  # weights packed at once: the temporaries stay in the cache


class Bits(NamedTuple):
    """Where `width` bits of a block's values, from bit `low` up, are stored.

    Values first ... first + outer * planes * inner - 1 are viewed as [outer, planes, inner]; plane p goes to bits
    shift + p * width and up of the outer * inner bytes that begin at byte `at`.
    """

    at: int
    view: tuple[int, int, int]
    width: int
    low: int = 0
    shift: int = 0
    first: int = 0

    @property
    def bytes(self) -> slice:
        return slice(self.at, self.at + self.view[0] * self.view[2])

    @property
    def values(self) -> slice:
        outer, planes, inner = self.view
        return slice(self.first, self.first + outer * planes * inner)


@dataclass(frozen=True)
class Layout:
    """A block: byte offsets of d and dmin (float16), the bits of codes, multiples and minima.

    code_bias, multiple_bias: what is added to a value before its low bits are stored. negated: dmin is stored with the
    other sign.
    """

    d: int
    codes: tuple[Bits, ...]
    dmin: int | None = None
    multiples: tuple[Bits, ...] = ()
    minima: tuple[Bits, ...] = ()
    code_bias: int = 0
    multiple_bias: int = 0
    negated: bool = False


def _nibbles(at: int) -> Bits:
    return Bits(at, (1, 2, 16), 4)


def _sixes(low_at: int, high_at: int, shift: int) -> tuple[Bits, ...]:
    """Eight values of six bits in the manner of Q4_K: four whole, four in nibbles with their tops in spare bits."""
    return (
        Bits(low_at, (1, 1, 4), 6),
        Bits(low_at, (1, 1, 4), 2, low=4, shift=6, first=4),
        Bits(high_at, (1, 1, 4), 4, shift=shift, first=4),
    )


_FIFTH_BITS = {at: Bits(at, (4, 8, 1), 1, low=4) for at in (2, 4)}
_FOUR_OF_256 = {at: Bits(at, (4, 2, 32), 4) for at in (16, 48)}
_TWO_OF_256 = {at: Bits(at, (2, 4, 32), 2) for at in (16, 32)}

LAYOUTS: dict[str, Layout] = {
    "Q4_0": Layout(0, (_nibbles(2),)),
    "Q4_1": Layout(0, (_nibbles(4),), dmin=2, negated=True),
    "Q5_0": Layout(0, (_FIFTH_BITS[2], _nibbles(6))),
    "Q5_1": Layout(0, (_FIFTH_BITS[4], _nibbles(8)), dmin=2, negated=True),
    "Q8_0": Layout(0, (Bits(2, (1, 1, 32), 8),), code_bias=128),
    "IQ4_NL": Layout(0, (_nibbles(2),)),
    "Q2_K": Layout(
        80,
        (_TWO_OF_256[16],),
        dmin=82,
        multiples=(Bits(0, (1, 1, 16), 4),),
        minima=(Bits(0, (1, 1, 16), 4, shift=4),),
    ),
    "Q3_K": Layout(
        108,
        (_TWO_OF_256[32], Bits(0, (1, 8, 32), 1, low=2)),
        multiples=(Bits(96, (1, 2, 8), 4), Bits(104, (1, 4, 4), 2, low=4)),
        multiple_bias=32,
    ),
    "Q4_K": Layout(0, (_FOUR_OF_256[16],), dmin=2, multiples=_sixes(4, 12, 0), minima=_sixes(8, 12, 4)),
    "Q5_K": Layout(
        0,
        (_FOUR_OF_256[48], Bits(16, (1, 8, 32), 1, low=4)),
        dmin=2,
        multiples=_sixes(4, 12, 0),
        minima=_sixes(8, 12, 4),
    ),
    "Q6_K": Layout(
        208,
        (Bits(0, (2, 2, 64), 4), Bits(128, (2, 4, 32), 2, low=4)),
        multiples=(Bits(192, (1, 1, 16), 8),),
    ),
    "IQ4_XS": Layout(
        0,
        (Bits(8, (8, 2, 16), 4),),
        multiples=(Bits(4, (4, 2, 1), 4), Bits(2, (2, 4, 1), 2, low=4)),
        multiple_bias=32,
    ),
}


def pack(coded: Coded) -> Tensor:
    """Rows as a GGUF file holds them: uint8 [out, in / block_size * block_bytes]."""
    if coded.grid.spec.name not in LAYOUTS:
        return coded.grid.gguf_rows(coded.codes)
    grid = cast("BlockGrid", coded.grid)
    rows, width = coded.codes.shape
    count = grid.d.shape[1] * grid.spec.block_bytes
    packed = torch.empty(rows, count, dtype=torch.uint8, device=coded.codes.device)
    for part in _pieces(rows, width) if rows else ():
        _pack(coded.rows(part), packed[part])
    return packed


def unpack(data: Tensor, spec: Spec) -> Coded:
    """Inverse of `pack`: uint8 [out, bytes] to codes and their grid. Raises CheckpointError for partial blocks."""
    if (block := BLOCK_TYPES.get(spec.name)) is None:
        return type_of(spec).of_gguf_rows(spec, data)
    return _unpacked(data, block)


def _unpacked(data: Tensor, spec: BlockSpec) -> Coded:
    rows, blocks = whole_blocks(data, spec.block_bytes, spec.name).shape[:2]
    width = blocks * spec.block_size
    return Coded.stacked([_unpack(data[part], spec) for part in _pieces(rows, width)])


def _pieces(rows: int, width: int) -> list[slice]:
    step = max(1, _CHUNK // max(width, 1))
    return [slice(start, start + step) for start in range(0, max(rows, 1), step)]


def _pack(coded: Coded, packed: Tensor) -> None:
    grid = cast("BlockGrid", coded.grid)
    spec, layout = grid.spec, LAYOUTS[grid.spec.name]
    blocks = packed.view(*grid.d.shape, spec.block_bytes)
    _put_half(blocks, layout.d, grid.d)
    if grid.dmin is not None and layout.dmin is not None:
        _put_half(blocks, layout.dmin, -grid.dmin if layout.negated else grid.dmin)
    codes = coded.codes + layout.code_bias if layout.code_bias else coded.codes
    parts = [(codes, layout.codes)]
    if grid.multiples is not None:
        parts.append(((grid.multiples + layout.multiple_bias).to(torch.int16).to(torch.uint8), layout.multiples))
    if grid.minima is not None:
        parts.append((grid.minima.to(torch.uint8), layout.minima))
    begun: set[int] = set()
    for values, places in parts:
        grouped = values.view(*grid.d.shape, -1)
        for bits in places:
            _put(blocks[..., bits.bytes], grouped[..., bits.values], bits, fresh=bits.at not in begun)
            begun.add(bits.at)


def _put(target: Tensor, values: Tensor, bits: Bits, *, fresh: bool) -> None:
    """Write the planes of `values` into their bits of `target`; the first write to a byte sets the byte."""
    outer, planes, inner = bits.view
    values = values.view(*values.shape[:2], *bits.view)
    merged = torch.empty(*values.shape[:2], outer, inner, dtype=torch.uint8, device=values.device)
    for plane in range(planes):
        field = _field(values[..., plane, :], bits)
        shift = bits.shift + plane * bits.width
        if plane == 0:
            torch.bitwise_left_shift(field, shift, out=merged)
        else:
            merged |= field << shift
    if fresh:
        target.copy_(merged.flatten(-2))
    else:
        target |= merged.flatten(-2)


def _field(values: Tensor, bits: Bits) -> Tensor:
    lowered = values >> bits.low if bits.low else values
    return lowered if bits.low + bits.width == 8 else lowered & ((1 << bits.width) - 1)


def _put_half(blocks: Tensor, at: int, value: Tensor) -> None:
    blocks[..., at : at + 2] = value.to(torch.float16).unsqueeze(-1).view(torch.uint8)


def _unpack(data: Tensor, spec: BlockSpec) -> Coded:
    layout = LAYOUTS[spec.name]
    blocks = data.reshape(data.shape[0], data.shape[1] // spec.block_bytes, spec.block_bytes)
    codes = _get(blocks, layout.codes, spec.block_size)
    if layout.code_bias:
        codes += layout.code_bias
    multiples = minima = dmin = None
    if spec.multiples is not None:
        lowest = spec.multiples[0]
        stored = _get(blocks, layout.multiples, spec.groups_per_block)
        multiples = (stored - (layout.multiple_bias + lowest) % 256).to(torch.float32) + lowest
        if spec.minima:
            minima = _get(blocks, layout.minima, spec.groups_per_block).to(torch.float32)
    if layout.dmin is not None:
        dmin = _get_half(blocks, layout.dmin)
        dmin = -dmin if layout.negated else dmin
    return Coded(codes, BlockGrid(spec, _get_half(blocks, layout.d), multiples, dmin, minima))


def _get(blocks: Tensor, places: tuple[Bits, ...], per_block: int) -> Tensor:
    """Values uint8 [out, blocks * per_block] from their bits."""
    values = torch.zeros(*blocks.shape[:2], per_block, dtype=torch.uint8, device=blocks.device)
    for bits in places:
        outer, planes, inner = bits.view
        stored = blocks[..., bits.bytes].view(*blocks.shape[:2], outer, inner)
        target = values[..., bits.values].view(*blocks.shape[:2], *bits.view)
        for plane in range(planes):
            field = (stored >> (bits.shift + plane * bits.width)) & ((1 << bits.width) - 1)
            target[..., plane, :] |= field << bits.low
    return values.flatten(1)


def _get_half(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).to(torch.float32)
