"""NVFP4: floats of 4 bits (E2M1) in groups of 16 that share a float of 8 bits (E4M3), and a factor of the matrix.

A weight is level * scale / divisor. All matrices that read one input have one divisor, because engines that multiply
them as one take the largest they find for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from llmcompress.grids.base import Clip
from llmcompress.grids.blocks import whole_blocks
from llmcompress.grids.chosen_scales import best_scale, by_blocks
from llmcompress.grids.coded import Coded
from llmcompress.grids.e2m1 import (
    LARGEST,
    E2m1Grid,
    E2m1Spec,
    E2m1Type,
    halves,
    nearest_levels,
    paired,
    unhalved,
    unpaired,
)
from llmcompress.grids.e4m3 import LARGEST as LARGEST_SCALE
from llmcompress.grids.e4m3 import rounded_
from llmcompress.grids.grid_type import Fitting
from llmcompress.lazy import Tensor, torch

_HEADROOM = 256.0  # the scale that covers the largest weight, where a search may choose larger ones
_SMALLEST_SCALE = 2.0**-9
_LEAST, _MOST = 1, 0x7E  # bytes of the smallest and of the largest scale
_MOVED = (-1, 1)  # bytes beside that of a group, tried with other codes
_OF_ZEROS = 0.125  # the scale of a group whose own is rounded to zero, as compressed-tensors has it
_TRIED = (0, -1, -2, -3, 1, 2, 3, 4, 5, 6)  # bytes beside the one that covers a group
_BLOCK_GROUPS = 4  # whose scales and codes lie together in GGUF files
_SMALL = 2.0**-100  # largest magnitudes below it are taken for it: a divisor must be a float32


@dataclass(frozen=True)
class Nvfp4Spec(E2m1Spec):
    """E2M1 codes times an E4M3 scale for each 16 input channels of a row, over one divisor."""

    type: ClassVar[str] = "nvfp4"
    name: ClassVar[str] = "nvfp4"
    group_size: ClassVar[int] = 16
    joins_rows: ClassVar[bool] = True
    joins_matrices: ClassVar[bool] = True
    gguf_type: ClassVar[str] = "NVFP4"

    def parts(self, rows: int, width: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {
            "weight_packed": ("U8", (rows, width // 2)),
            "weight_scale": ("F8_E4M3", (rows, self.groups(width))),
            "weight_global_scale": ("F32", (1,)),
        }


@dataclass(frozen=True)
class Nvfp4Grid(E2m1Grid):
    """Fitted grid of a matrix [out, in]: small [out, groups] float32, values of E4M3; divisor [1] float32."""

    spec: Nvfp4Spec
    small: Tensor
    divisor: Tensor

    by_row: ClassVar[Mapping[str, str | None]] = {"small": "float8_e4m3fn"}
    shared: ClassVar[Mapping[str, str | None]] = {"divisor": None}

    @property
    def scale(self) -> Tensor:
        return self.small / self.divisor

    @property
    def scale_parts(self) -> tuple[Tensor, Tensor | None]:
        return self.small, self.gguf_factor

    def beside_scale(self, old: Tensor) -> Sequence[Tensor]:
        at = (old * self.divisor).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int16)
        return [old, *(_of_byte(at + step) / self.divisor for step in _MOVED)]

    def rescaled(self, scale: Tensor) -> Nvfp4Grid:
        return replace(self, small=_rounded(scale * self.divisor).contiguous())

    def packed(self, codes: Tensor) -> dict[str, Tensor]:
        return {
            "weight_packed": paired(codes),
            "weight_scale": self.small.to(torch.float8_e4m3fn),
            "weight_global_scale": self.divisor,
        }

    @property
    def gguf_factor(self) -> Tensor:
        return self.divisor.reciprocal()

    def gguf_rows(self, codes: Tensor) -> Tensor:
        rows, groups = self.small.shape
        scales = self.small.to(torch.float8_e4m3fn).view(torch.uint8).view(rows, -1, _BLOCK_GROUPS)
        packed = halves(codes, self.spec.group_size).reshape(rows, groups // _BLOCK_GROUPS, -1)
        return torch.cat([scales, packed], dim=2).flatten(1)


@dataclass(frozen=True)
class FactoredGrid(Nvfp4Grid):
    """The same with a factor [1] float32 in place of the divisor, as some store it: a reciprocal is not always exact.

    divisor: the reciprocal, by which other formats tell the codes.
    """

    factor: Tensor

    shared: ClassVar[Mapping[str, str | None]] = {"divisor": None, "factor": None}

    @property
    def scale(self) -> Tensor:
        return self.small * self.factor

    @property
    def gguf_factor(self) -> Tensor:
        return self.factor


class Nvfp4(E2m1Type):
    """Floats of 4 bits times a float of 8 bits of their group."""

    name = "nvfp4"
    place = 7
    values = "4-bit floats in blocks of 16"
    pattern = "nvfp4"
    formats: ClassVar[tuple[str, ...]] = ("compressed-tensors", "modelopt")
    made = Nvfp4Spec()

    def is_compat(self, spec: Nvfp4Spec) -> bool:
        return False

    def fit(self, weight: Tensor, spec: Nvfp4Spec, how: Fitting) -> Nvfp4Grid:
        return fit(weight, how.clip, how.importance)

    def fit_beside(self, weight: Tensor, grid: Nvfp4Grid, how: Fitting) -> Nvfp4Grid:
        return fit(weight, how.clip, how.importance, divisor=grid.divisor)

    def restored(self, spec: Nvfp4Spec, width: int, parts: Mapping[str, Tensor]) -> Nvfp4Grid:
        small = parts["small"].to(torch.float32)
        if "factor" in parts:
            return FactoredGrid(spec, small, parts["divisor"], parts["factor"])
        return Nvfp4Grid(spec, small, parts["divisor"])

    def unpacked(self, spec: Nvfp4Spec, parts: Mapping[str, Tensor]) -> Coded:
        small = parts["weight_scale"].to(torch.float32)
        return Coded(unpaired(parts["weight_packed"]), Nvfp4Grid(spec, small, parts["weight_global_scale"].reshape(1)))

    def of_gguf_rows(self, spec: Nvfp4Spec, rows: Tensor) -> Coded:
        blocks = whole_blocks(rows, _BLOCK_GROUPS * (1 + spec.group_size // 2), spec.gguf_type)
        scales = blocks[..., :_BLOCK_GROUPS].reshape(len(rows), -1) & 0x7F  # llama.cpp knows no signs of scales
        small = scales.view(torch.float8_e4m3fn).to(torch.float32).nan_to_num(nan=0.0)
        packed = blocks[..., _BLOCK_GROUPS:].reshape(len(rows), -1, spec.group_size // 2)
        return Coded(unhalved(packed), Nvfp4Grid(spec, small, torch.ones(1)))


GRID = Nvfp4()


def fit(
    weight: Tensor,
    clip: Clip = "search",
    importance: Tensor | None = None,
    spec: Nvfp4Spec = GRID.made,
    divisor: Tensor | None = None,
) -> Nvfp4Grid:
    """Choose the scales for weight [out, in] float32, and the divisor [1] where it is not given.

    minmax: scales that cover each group, rounded to nearest, as compressed-tensors does. search: of ten neighbouring
    scales the one of least squared error, each input channel weighted by importance [in]; some are larger than cover
    the group, since the levels are denser below 4 than beyond (Cook et al., 2025, arXiv:2512.02010).
    """
    if divisor is None:
        top = LARGEST_SCALE if clip == "minmax" else _HEADROOM
        divisor = (top * LARGEST / weight.abs().amax().clamp_min(_SMALL)).reshape(1)

    def smalls(block: Tensor, weigh: Tensor) -> Tensor:
        covering = (divisor * block.abs().amax(-1) / LARGEST).clamp_(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
        if clip == "minmax":
            found = covering.to(torch.float32)
            return torch.where(found == 0, _OF_ZEROS, found)
        at = covering.view(torch.uint8).to(torch.int16)
        scales = [_of_byte(at + step) / divisor for step in _TRIED]
        return _rounded(best_scale(block, weigh, scales, nearest_levels) * divisor)

    return Nvfp4Grid(spec, by_blocks(weight, spec.group_size, importance, smalls), divisor)


def _of_byte(byte: Tensor) -> Tensor:
    """Positive scales float32 of bytes int16, those beyond the ends taken for the ends."""
    return byte.clamp(_LEAST, _MOST).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


def _rounded(small: Tensor) -> Tensor:
    """Scales rounded to positive values of E4M3."""
    return rounded_(small.clamp_min(_SMALLEST_SCALE))
