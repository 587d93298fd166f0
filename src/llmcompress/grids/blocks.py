"""Block types of GGML as grids: groups of 16 or 32 weights whose scales are themselves codes of a super-block.

A value is scale * level, or scale * level - least for the types with minima. The scale of a group is a float16 `d` of
its block times a small whole number, and so is its minimum with `dmin`; types of one group per block have `d` alone.
Sources: GGUF's block layouts; names are those of the tensor types in a GGUF file.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompress.grids.base import BlockSpec

_STORED = {"d": torch.float16, "dmin": torch.float16, "multiples": torch.int8, "minima": torch.int8}
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class BlockGrid:
    """Fitted block grid of a matrix [out, in].

    d [out, blocks] float32 holding float16 values. multiples [out, groups] float32 whole numbers: the scale of a group
    is d * multiple; None where it is d. dmin, minima: the same for what is subtracted; both None for types without.
    """

    spec: BlockSpec
    d: Tensor
    multiples: Tensor | None = None
    dmin: Tensor | None = None
    minima: Tensor | None = None

    rounded_ = staticmethod(torch.round_)

    @property
    def scale(self) -> Tensor:
        """Scale of each group [out, groups]; may be zero or negative."""
        return _product(self.d, self.multiples)

    @property
    def offset(self) -> Tensor | None:
        """What is added to scale * level [out, groups], or None."""
        return None if self.dmin is None else -_product(self.dmin, self.minima)

    @property
    def group_index(self) -> Tensor:
        """[in] int64: the group of each input channel."""
        groups = self.d.shape[1] * self.spec.groups_per_block
        return torch.arange(groups, device=self.d.device).repeat_interleave(self.spec.group_size)

    @property
    def table(self) -> Tensor | None:
        """Levels of the codes [levels] float32, where they are not whole numbers one apart."""
        return torch.tensor(IQ4_LEVELS, dtype=torch.float32, device=self.d.device) if self.spec.curved else None

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Least and largest level of each group [out, groups]."""
        spec, scale = self.spec, self.scale
        least = torch.full_like(scale, spec.lowest - spec.middle)
        return least, torch.full_like(scale, spec.levels - 1 - spec.middle)

    def levels(self, codes: Tensor) -> Tensor:
        """Levels float32 of codes [out, in]: what they stand for, in units of the scale."""
        table = self.table
        return codes.to(torch.float32) - self.spec.middle if table is None else table[codes.long()]

    def codes(self, levels: Tensor) -> Tensor:
        """Codes uint8 of the levels [out, in] nearest to values given in units of the scale, offset removed."""
        table = self.table
        if table is not None:
            return torch.bucketize(levels.contiguous(), between(table), right=True).to(torch.uint8)
        codes = (levels + self.spec.middle).round_().clamp_(self.spec.lowest, self.spec.levels - 1)
        return codes.to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Values float32 of codes uint8 [out, in]: the formula every engine uses."""
        value = self.levels(codes).view(*self._grouped) * self.scale.unsqueeze(-1)
        offset = self.offset
        return (value if offset is None else value + offset.unsqueeze(-1)).view(codes.shape)

    def encode(self, weight: Tensor) -> Tensor:
        """Nearest codes uint8 of a whole matrix [out, in]; level zero or the lowest where a scale is zero."""
        grouped, offset, scale = weight.view(*self._grouped), self.offset, self.scale.unsqueeze(-1)
        inverse = torch.where(scale == 0, 0.0, 1 / scale)
        return self.codes((grouped if offset is None else grouped - offset.unsqueeze(-1)) * inverse).view(weight.shape)

    @property
    def _grouped(self) -> tuple[int, int, int]:
        return self.d.shape[0], self.d.shape[1] * self.spec.groups_per_block, self.spec.group_size

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors it has, by field."""
        named = {"d": self.d, "multiples": self.multiples, "dmin": self.dmin, "minima": self.minima}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def stored(self) -> dict[str, Tensor]:
        """Tensors that tell this grid from others of its spec, in small types; `restored` takes them back."""
        return {name: tensor.to(_STORED[name]) for name, tensor in self.parts.items()}

    @classmethod
    def restored(cls, spec: BlockSpec, **parts: Tensor) -> "BlockGrid":
        return cls(spec, **{name: tensor.to(torch.float32) for name, tensor in parts.items()})

    def to(self, device: torch.device | str) -> "BlockGrid":
        """The same grid on another device."""
        return BlockGrid(self.spec, **{name: tensor.to(device) for name, tensor in self.parts.items()})

    def rows(self, index: slice | Tensor) -> "BlockGrid":
        """The grid of some output rows."""
        return BlockGrid(self.spec, **{name: tensor[index] for name, tensor in self.parts.items()})

    @classmethod
    def stacked(cls, grids: "Sequence[BlockGrid]") -> "BlockGrid":
        """The grid of matrices whose rows follow one another."""
        parts = [grid.parts for grid in grids]
        return cls(grids[0].spec, **{name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def between(levels: Tensor) -> Tensor:
    """Midpoints of levels that ascend along the last dimension: a value on one belongs to the level above."""
    return (levels[..., 1:] + levels[..., :-1]) / 2


def float16(value: Tensor) -> Tensor:
    """Values rounded to float16, within its range, as float32."""
    return value.clamp(-65504.0, 65504.0).to(torch.float16).to(torch.float32)


def _product(unit: Tensor, multiples: Tensor | None) -> Tensor:
    if multiples is None:
        return unit
    return unit.repeat_interleave(multiples.shape[1] // unit.shape[1], dim=1) * multiples
