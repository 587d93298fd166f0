"""A quantised matrix: codes on their grid, whatever the grid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmcompress.grids.base import BlockSpec, CodebookSpec, GridSpec, Int8Spec, Nf4Spec, Spec
from llmcompress.grids.blocks import BlockGrid
from llmcompress.grids.codebook import CodebookGrid
from llmcompress.grids.int8 import Int8Grid
from llmcompress.grids.integer import IntegerGrid
from llmcompress.grids.nf4 import Nf4Grid

Grid = IntegerGrid | BlockGrid | Nf4Grid | CodebookGrid | Int8Grid
_GRIDS: Mapping[type, Any] = {
    GridSpec: IntegerGrid,
    BlockSpec: BlockGrid,
    Nf4Spec: Nf4Grid,
    CodebookSpec: CodebookGrid,
    Int8Spec: Int8Grid,
}


@dataclass(frozen=True)
class Coded:
    """Codes uint8 [out, in] on their grid. What is stored is what the next layer sees."""

    codes: Tensor
    grid: Grid

    def decode(self) -> Tensor:
        """Values float32 [out, in]."""
        return self.grid.decode(self.codes)

    def rows(self, index: slice | Tensor) -> "Coded":
        """Some output rows."""
        return Coded(self.codes[index], self.grid.rows(index))

    def to(self, device: torch.device | str) -> "Coded":
        """The same on another device."""
        return Coded(self.codes.to(device), self.grid.to(device))

    def stored(self) -> dict[str, Tensor]:
        """Tensors that, with the grid's spec, are all there is to it; `restored` takes them back."""
        return {"codes": self.codes, **self.grid.stored()}

    @classmethod
    def restored(cls, spec: Spec, parts: Mapping[str, Tensor]) -> "Coded":
        """KeyError or TypeError if parts lack something."""
        grid = {name: tensor for name, tensor in parts.items() if name != "codes"}
        return cls(parts["codes"], _GRIDS[type(spec)].restored(spec, **grid))

    @classmethod
    def stacked(cls, parts: "Sequence[Coded]") -> "Coded":
        """One matrix of parts of its rows, which have grids of one kind."""
        if len(parts) == 1:
            return parts[0]
        grids: Sequence[Any] = [part.grid for part in parts]
        return cls(torch.cat([part.codes for part in parts]), grids[0].stacked(grids))
