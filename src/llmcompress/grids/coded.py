"""A quantised matrix: codes on their grid, whatever the grid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llmcompress.grids.base import (
    BlockSpec,
    CodebookSpec,
    DenseSpec,
    GridSpec,
    Int8Spec,
    Nf4Spec,
    ProgressiveSpec,
    Spec,
)
from llmcompress.grids.blocks import BlockGrid
from llmcompress.grids.codebook import CodebookGrid
from llmcompress.grids.dense import DenseGrid
from llmcompress.grids.float8 import FloatGrid
from llmcompress.grids.int8 import Int8Grid
from llmcompress.grids.integer import IntegerGrid
from llmcompress.grids.nf4 import Nf4Grid
from llmcompress.grids.progressive import ProgressiveGrid

Grid = IntegerGrid | FloatGrid | BlockGrid | Nf4Grid | CodebookGrid | Int8Grid | ProgressiveGrid
_GRIDS: Mapping[type, Any] = {
    DenseSpec: DenseGrid,
    GridSpec: IntegerGrid,
    BlockSpec: BlockGrid,
    Nf4Spec: Nf4Grid,
    CodebookSpec: CodebookGrid,
    Int8Spec: Int8Grid,
    ProgressiveSpec: ProgressiveGrid,
}


@dataclass(frozen=True)
class Coded:
    """Codes uint8 [out, in] on their grid; floats where nothing is rounded. What is stored is what the next layer sees.

    input_scale [1] float32: of the inputs, where these are rounded with a fixed one.
    """

    codes: Tensor
    grid: Grid
    input_scale: Tensor | None = None

    def decode(self) -> Tensor:
        """Values float32 [out, in]."""
        return self.grid.decode(self.codes)

    def rows(self, index: slice | Tensor) -> "Coded":
        """Some output rows."""
        return replace(self, codes=self.codes[index], grid=self.grid.rows(index))

    def to(self, device: torch.device | str) -> "Coded":
        """The same on another device."""
        scale = None if self.input_scale is None else self.input_scale.to(device)
        return Coded(self.codes.to(device), self.grid.to(device), scale)

    def stored(self) -> dict[str, Tensor]:
        """Tensors that, with the grid's spec, are all there is to it; `restored` takes them back."""
        fixed = {} if self.input_scale is None else {"input_scale": self.input_scale}
        return {"codes": self.codes, **fixed, **self.grid.stored()}

    @classmethod
    def restored(cls, spec: Spec, parts: Mapping[str, Tensor]) -> "Coded":
        """KeyError or TypeError if parts lack something."""
        parts = dict(parts)
        codes, scale = parts.pop("codes"), parts.pop("input_scale", None)
        if isinstance(spec, GridSpec) and spec.type == "fp8":
            return cls(codes, FloatGrid.restored(spec, codes.shape[1], **parts), scale)
        return cls(codes, _GRIDS[type(spec)].restored(spec, **parts), scale)

    @classmethod
    def stacked(cls, parts: "Sequence[Coded]") -> "Coded":
        """One matrix of parts of its rows, which have grids of one kind."""
        if len(parts) == 1:
            return parts[0]
        grids: Sequence[Any] = [part.grid for part in parts]
        return replace(parts[0], codes=torch.cat([part.codes for part in parts]), grid=grids[0].stacked(grids))
