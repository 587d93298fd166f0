"""Weights that are not rounded to a grid: what pruning leaves, in the type they are stored in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from llmcompress.grids.base import PER_ROW, Spec
from llmcompress.grids.coded import Grid
from llmcompress.grids.grid_type import GridType
from llmcompress.lazy import Tensor, torch

TYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True)
class DenseSpec(Spec):
    """No grid: the values that a tensor of this type may hold. dtype: BF16, F16, F32 or F64."""

    dtype: str

    type: ClassVar[str] = "dense"
    symmetric: ClassVar[bool] = True
    group_size: ClassVar[int] = PER_ROW
    rounds_at_once: ClassVar[bool] = False
    unrounded: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"dense-{self.dtype.lower()}"

    @property
    def bits(self) -> int:
        return {"F32": 32, "F64": 64}.get(self.dtype, 16)

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight; zeros take as much as any other."""
        return float(self.bits)


@dataclass(frozen=True)
class DenseGrid(Grid):
    """Codes are the values themselves [out, in], in the type of the spec."""

    spec: DenseSpec

    def encode(self, weight: Tensor) -> Tensor:
        found: Tensor = weight.to(getattr(torch, TYPES[self.spec.dtype]))
        return found

    def decode(self, codes: Tensor) -> Tensor:
        return codes.to(torch.float32)


class Dense(GridType):
    """Values in the type that they are stored in."""

    name = "dense"
    place = 98
    pattern = "dense-(bf16|f16|f32|f64)"
    chosen = False

    def named(self, found: re.Match[str]) -> Spec:
        return DenseSpec(found[1].upper())

    def restored(self, spec: DenseSpec, width: int, parts: Mapping[str, Tensor]) -> DenseGrid:
        return DenseGrid(spec)


GRID = Dense()
