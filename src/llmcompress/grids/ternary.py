"""Types of GGUF for models whose weights are ternary: TQ1_0 and TQ2_0, minus one, zero or one times a scale of 256.

Codes are 0 to 2; TQ2_0 has a fourth that stands for two, which is read but never chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llmcompress.grids.base import Search
from llmcompress.grids.block_type import BlockType
from llmcompress.grids.blocks import BlockGrid, BlockSpec, whole_blocks
from llmcompress.grids.coded import Coded
from llmcompress.grids.scales import float16
from llmcompress.hardware import at_once
from llmcompress.lazy import Tensor, torch
from llmcompress.packing.ternary_bytes import pack_tq1, pack_tq2, take_tq1, take_tq2

if TYPE_CHECKING:
    from llmcompress.workers import Workers

_CHUNK = 1 << 17  # weights fitted at once: they stay in the cache
_HALF = 2  # bytes of d, the last of a block


@dataclass(frozen=True)
class TernarySpec(BlockSpec):
    """A block of three levels and one scale."""

    type: ClassVar[str] = "ternary"

    @property
    def levels(self) -> int:
        return 3


SPECS = {spec.name: spec for spec in (TernarySpec(f"TQ{n}_0", 256, size, 256, 2, 1) for n, size in ((1, 54), (2, 66)))}
_BYTES = {"TQ1_0": (pack_tq1, take_tq1), "TQ2_0": (pack_tq2, take_tq2)}


@dataclass(frozen=True)
class TernaryGrid(BlockGrid):
    """Fitted grid of a matrix [out, in]; of the fields of `BlockGrid` it has d alone."""

    spec: TernarySpec

    def gguf_rows(self, codes: Tensor) -> Tensor:
        held = _BYTES[self.spec.name][0](codes.view(*self.d.shape, -1))
        half = self.d.to(torch.float16).unsqueeze(-1).view(torch.uint8)
        return torch.cat([held, half], dim=-1).flatten(1)


def fitted(weight: Tensor, spec: TernarySpec, workers: Workers, importance: Tensor | None = None) -> Coded:
    """Codes and scales of weight [out, in] float32 of least error, the sum of importance [in] * (w - q)^2.

    For the n largest magnitudes of a block as ones, the best scale is their mean and lowers the error by its square
    times their importance; all n are tried.
    """

    def piece(part: Tensor) -> Coded:
        part = part.to(torch.float32)
        blocks = part.view(len(part), -1, spec.block_size)
        size, order = blocks.abs().sort(dim=-1, descending=True)
        costs = torch.ones_like(size)
        if importance is not None:
            costs = importance.to(torch.float32).view(1, *blocks.shape[1:]).expand_as(size).gather(-1, order)
        held, cost = (costs * size).cumsum(-1, dtype=torch.float64), costs.cumsum(-1, dtype=torch.float64)
        mean = torch.where(cost > 0, held / cost, 0.0)
        best = (mean * held).argmax(-1, keepdim=True)
        grid = TernaryGrid(spec, float16(mean.gather(-1, best).squeeze(-1).to(torch.float32)))
        return Coded(grid.encode(part), grid)

    return Coded.by_rows(weight, at_once(weight, _CHUNK), workers, piece)


class Ternaries(BlockType):
    """Types of GGUF of three levels."""

    name = "ternary"
    place = 97
    pattern = "|".join(SPECS)
    known = SPECS
    made = TernaryGrid
    said = "{} levels, groups of {}, for weights that are ternary; {:g} bits per weight"

    def rounded(
        self, weight: Tensor, spec: TernarySpec, search: Search, workers: Workers, importance: Tensor | None
    ) -> Coded:
        from llmcompress.packing.plain import plain

        if search == "compat":  # the gguf package rounds as llama-quantize does, which takes no importance
            return self.of_gguf_rows(spec, plain(weight, spec.name))
        return fitted(weight, spec, workers, importance)

    def of_gguf_rows(self, spec: TernarySpec, rows: Tensor) -> Coded:
        blocks = whole_blocks(rows, spec.block_bytes, spec.name)
        d = blocks[..., -_HALF:].contiguous().view(torch.float16).squeeze(-1).to(torch.float32)
        codes = _BYTES[spec.name][1](blocks[..., :-_HALF].contiguous())
        return Coded(codes.flatten(1), TernaryGrid(spec, d))


GRID = Ternaries()
