"""What the types of GGUF files have in common as grids: they are known by name, and rounded to at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from llmcompress.grids.base import Spec
from llmcompress.grids.blocks import BlockGrid, BlockSpec
from llmcompress.grids.coded import Grid, wide
from llmcompress.grids.grid_type import Fitting, GridType
from llmcompress.lazy import Tensor

if TYPE_CHECKING:
    from llmcompress.workers import Workers


class BlockType(GridType):
    """Types of GGUF that are rounded to by `rounded`.

    known: their specs by name. made: the class of their grids. said: what lists say of one, of its levels, the size of
    its groups and its bits.
    """

    chosen = False
    clips = False
    formats = ("gguf",)
    known: ClassVar[Mapping[str, BlockSpec]]
    made: ClassVar[type[BlockGrid]] = BlockGrid
    said: ClassVar[str] = "{} levels, groups of {}; {:g} bits per weight"

    def named(self, found: re.Match[str]) -> Spec:
        return self.known[found[0]]

    def specs(self) -> list[Spec]:
        return list(self.known.values())

    def listed(self) -> list[tuple[str, str]]:
        return [(s.name, self.said.format(s.levels, s.group_size, s.bits_per_weight(0))) for s in self.specs()]

    def fit(self, weight: Tensor, spec: Any, how: Fitting) -> Grid:
        from llmcompress.workers import SERIAL

        found = self.rounded(weight, spec, how.search, SERIAL, how.importance)  # who fits shares rows out
        assert found is not None
        return found.grid

    def nearest(self, weight: Tensor, spec: Any, workers: Workers) -> Tensor:
        found = self.rounded(weight, spec, "fast", workers, None)
        assert found is not None
        return found.decode()

    def restored(self, spec: Any, width: int, parts: Mapping[str, Tensor]) -> Grid:
        return self.made(spec, **wide(parts))
