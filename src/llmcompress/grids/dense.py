"""Weights that are not rounded to a grid: what pruning leaves, in the type they are stored in."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompress.grids.base import DenseSpec

TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class DenseGrid:
    """Codes are the values themselves [out, in], in the type of the spec."""

    spec: DenseSpec

    def encode(self, weight: Tensor) -> Tensor:
        """Nearest values of a matrix [out, in]."""
        return weight.to(TYPES[self.spec.dtype])

    def decode(self, codes: Tensor) -> Tensor:
        """Values float32 of codes [out, in]."""
        return codes.to(torch.float32)

    def stored(self) -> dict[str, Tensor]:
        """Nothing is needed beside the codes."""
        return {}

    @classmethod
    def restored(cls, spec: DenseSpec) -> "DenseGrid":
        return cls(spec)

    def to(self, device: torch.device | str) -> "DenseGrid":
        """The same, whatever the device."""
        return self

    def rows(self, index: slice | Tensor) -> "DenseGrid":
        """The grid of some output rows."""
        return self

    @classmethod
    def stacked(cls, grids: "Sequence[DenseGrid]") -> "DenseGrid":
        """The grid of matrices whose rows follow one another."""
        return grids[0]
