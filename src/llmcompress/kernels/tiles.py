"""Matrices of whole numbers, or of floats of 4 bits, in the order in which the kernels of `csrc/weights.cuh` read them.

A block is 32 outputs x 128 inputs; what one lane of a warp multiplies lies together, in pieces of 16 bytes:

    output 32 N + 16 r + 8 i0 + g
    input 128 K + 64 h + 32 s1 + 8 t + 4 s0 + 2 i1 + e
    block (N, K), lane 4 g + t, unit 2 h + r, pair 8 s1 + 4 s0 + 2 i1 + i0, half e

A unit has `bits` words: pair j is field j of their halves, from the low bits up. With 3 bits five fields fill 15 bits
of a half, and bit b of pair 15 is the top bit of word b.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded, Grid
from llmcompress.kernels.compile_errors import TakesNotError
from llmcompress.kernels.tensor_checks import bfloat, ceil

OUTPUTS, INPUTS = 32, 128
GROUPS = (32, 64, 128)
_STORED_AS = {2: 2, 3: 3, 4: 4, 5: 8, 6: 8, 8: 8}  # bits of codes: bits they are kept in
_SMALL_GROUP = 16  # inputs that share a scale in E4M3
_LIFTED = 2.0**8  # by which levels times such scales are too small in `csrc/weights.cuh`
_CHUNK = 1 << 22  # codes arranged at once: the temporaries take 4 bytes for each, a few times


@dataclass(frozen=True)
class TileSpec:
    """What tiles hold.

    bits: of a code. group: inputs that share a scale. zero: of all groups, or None where each has its own.
    scale: the type of the scales. floats: whether codes are E2M1; then each 16 inputs may share a scale in E4M3, which
    lies in a zero point's place (`zero` None).
    """

    bits: int
    group: int
    zero: int | None
    scale: torch.dtype
    floats: bool = False

    @property
    def block_bytes(self) -> int:
        """Of a block's codes, scales and zero points."""
        codes, scales = INPUTS * self.bits // 8, INPUTS // self.group * self.scale.itemsize
        zeros = 0 if self.zero is not None else INPUTS // (_SMALL_GROUP if self.floats else self.group)
        return OUTPUTS * (codes + scales + zeros)

    def defines(self, dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
        """Macros of `csrc/weights.cuh`. Raises TakesNotError unless activations are float16 or bfloat16."""
        zero = -1 if self.zero is None else self.zero
        scale = (torch.float16, torch.bfloat16, torch.float32).index(self.scale)
        return (
            *(("BFLOAT", bfloat(dtype)), ("BITS", self.bits), ("GROUP", self.group), ("ZERO", zero)),
            *(("SCALE", scale), ("FLOATS", int(self.floats))),
        )


USUAL = (
    *(
        TileSpec(bits, group, zero, torch.float16)
        for bits in (2, 3, 4, 8)
        for group, zero in ((128, 1 << (bits - 1)), (32, None))
    ),
    TileSpec(4, 32, 0, torch.float16, floats=True),
    TileSpec(4, 128, None, torch.float32, floats=True),
)
"""What checkpoints most often hold, and what takes most registers."""


@dataclass(frozen=True)
class TiledWeight:
    """A matrix [outputs, inputs] for the kernels `matmul` and `dequantise`.

    codes: int32 [N, K, bits, 32, 4]. scales [N, K, 128 / group, 8, 4]. zeros: uint8 as scales, where each group has its
    own, or [N, K, 8, 8, 4], scales of 16 inputs. order: the input channels in the order in which codes are kept, or
    None if that is their own.
    """

    spec: TileSpec
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    outputs: int
    inputs: int
    order: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Of all that the kernels read."""
        return self.codes.shape[0] * self.codes.shape[1] * self.spec.block_bytes

    def rows(self, begin: int, end: int) -> "TiledWeight":
        """Outputs begin ... end - 1; both are multiples of 32, or `end` is the number of outputs."""
        part = slice(begin // OUTPUTS, ceil(end, OUTPUTS))
        zeros = None if self.zeros is None else self.zeros[part]
        return replace(
            self, codes=self.codes[part], scales=self.scales[part], zeros=zeros, outputs=min(end, self.outputs) - begin
        )


def tiled(coded: Coded) -> TiledWeight:
    """A matrix of whole numbers in tiles. Raises TakesNotError for grids that the kernels do not take."""
    grid = coded.grid
    if not grid.spec.affine:
        raise TakesNotError(f"the kernels take grids of whole numbers, not {grid.spec.name}")
    outputs, inputs = coded.codes.shape
    width = grid.spec.width(inputs)
    if width < inputs and width not in GROUPS and width % INPUTS:
        raise TakesNotError(f"the kernels take groups of 32, 64, multiples of 128 or whole rows, not of {width}")
    bits, group = _STORED_AS[grid.spec.bits], width if width in GROUPS and width < inputs else INPUTS
    order = _order(grid, width)
    codes = coded.codes if order is None else coded.codes[:, order]
    middle = grid.spec.middle if grid.spec.symmetric and grid.centred else None
    zeros = None if middle is not None else _per_group(grid.zero.to(torch.uint8), inputs, width, group)
    scales = _per_group(_smallest(grid.scale), inputs, width, group)
    spec = TileSpec(bits, group, middle, scales.dtype)
    return TiledWeight(spec, tile_codes(codes, bits), scales, zeros, outputs, inputs, order)


def tiled_floats(coded: Coded) -> TiledWeight:
    """A matrix of floats of 4 bits (E2M1) in tiles, its scales powers of two, or of E4M3 with a factor of all."""
    grid: Any = coded.grid
    (outputs, inputs), codes = coded.codes.shape, tile_codes(coded.codes, 4)
    width = grid.spec.width(inputs)
    small, factor = grid.scale_parts
    if factor is None:
        scales = _per_group(_smallest(small), inputs, width, width)
        return TiledWeight(TileSpec(4, width, 0, scales.dtype, True), codes, scales, None, outputs, inputs)
    bytes_ = _per_group(small.to(torch.float8_e4m3fn).view(torch.uint8), inputs, width, _SMALL_GROUP)
    scales = _per_group((factor * _LIFTED).expand(outputs, 1), inputs, inputs, INPUTS)
    return TiledWeight(TileSpec(4, INPUTS, None, torch.float32, True), codes, scales, bytes_, outputs, inputs)


def stacked(weights: Sequence[TiledWeight]) -> TiledWeight:
    """Matrices of whole tiles, alike but for their outputs, as one: the outputs of one after those of another."""
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    return replace(
        weights[0],
        codes=torch.cat([weight.codes for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        zeros=torch.cat(zeros) if zeros else None,
        outputs=sum(weight.outputs for weight in weights),
    )


def tile_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes [outputs, inputs] to int32 [N, K, bits, 32, 4]; zeros fill the last blocks."""
    step = max(1, _CHUNK // (OUTPUTS * max(codes.shape[1], 1))) * OUTPUTS
    return torch.cat([_tile(codes[start : start + step], bits) for start in range(0, codes.shape[0], step)])


def _tile(codes: Tensor, bits: int) -> Tensor:
    down, along = ceil(codes.shape[0], OUTPUTS), ceil(codes.shape[1], INPUTS)
    padded = torch.zeros(down * OUTPUTS, along * INPUTS, dtype=torch.int32, device=codes.device)
    padded[: codes.shape[0], : codes.shape[1]] = codes
    axes = padded.view(down, 2, 2, 8, along, 2, 2, 4, 2, 2, 2)  # N r i0 g, K h s1 t s0 i1 e
    pairs = axes.permute(0, 4, 3, 7, 5, 1, 6, 8, 9, 2, 10).reshape(
        down, along, 32, 4, 16, 2
    )  # N K, lane, unit, pair, e
    halves = pairs[..., 0] | pairs[..., 1] << 16
    per_word = 16 // bits
    fields = halves[..., : bits * per_word].reshape(*halves.shape[:-1], bits, per_word)
    words = fields[..., 0].clone()
    for place in range(1, per_word):
        words |= fields[..., place] << (bits * place)
    if bits == 3:
        for bit in range(bits):
            words[..., bit] |= (halves[..., 15] >> bit & 0x00010001) << 15
    return words.reshape(down, along, 32, bits, 4).transpose(2, 3).contiguous()


def _per_group(values: Tensor, inputs: int, width: int, group: int) -> Tensor:
    """Values [outputs, groups of `width` inputs] for every group of `group` inputs: [N, K, 128 / group, 8, 4]."""
    down, along = ceil(values.shape[0], OUTPUTS), ceil(inputs, INPUTS)
    first = torch.arange(along * INPUTS // group, device=values.device) * group
    padded = values.new_zeros(down * OUTPUTS, len(first))
    padded[: values.shape[0]] = values[:, (first // width).clamp(max=values.shape[1] - 1)]
    return padded.view(down, 4, 8, along, INPUTS // group).permute(0, 3, 4, 2, 1).contiguous()


def _smallest(scale: Tensor) -> Tensor:
    """Scales in 16 bits if these hold them exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scale.to(dtype).to(torch.float32), scale):
            return scale.to(dtype)
    return scale


def _order(grid: Grid, width: int) -> Tensor | None:
    natural = torch.arange(len(grid.group_index), device=grid.group_index.device) // width
    if torch.equal(grid.group_index, natural):
        return None
    order = torch.argsort(grid.group_index, stable=True)
    if not torch.equal(grid.group_index[order], natural):
        raise TakesNotError(f"the kernels take groups of equal size: some group has not {width} input channels")
    return order
