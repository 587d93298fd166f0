"""Block types of GGML as grids: groups of 16 or 32 weights whose scales are themselves codes of a super-block.

A value is scale * level, or scale * level - least for the types with minima. The scale of a group is a float16 `d` of
its block times a small whole number, and so is its minimum with `dmin`; types of one group per block have `d` alone.
Sources: GGUF's block layouts; names are those of the tensor types in a GGUF file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from llmcompress.errors import CheckpointError
from llmcompress.grids.base import Spec
from llmcompress.grids.coded import Coded, Grid
from llmcompress.grids.level_table import level_table
from llmcompress.grids.scales import float16
from llmcompress.lazy import Tensor, torch

if TYPE_CHECKING:
    from typing import Self

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class BlockSpec(Spec):
    """A tensor type of GGML whose values are scale * (code - middle), less a minimum where the type has minima.

    block_size, block_bytes: weights and bytes of a block. group_size: weights that share a scale. bits: of a code.
    middle: the code of value zero. lowest: the least code that encoders choose. multiples: least and largest whole
    number a group's scale is of its block's; None where a block is one group. minima: whether there are any. curved:
    codes stand for levels that are not evenly spaced.
    """

    name: str
    block_size: int
    block_bytes: int
    group_size: int
    bits: int
    middle: int = 0
    lowest: int = 0
    multiples: tuple[int, int] | None = None
    minima: bool = False
    curved: bool = False

    type: ClassVar[str] = "ggml"
    whole_width: ClassVar[bool] = False

    @property
    def gguf_type(self) -> str:
        return self.name

    @property
    def groups_per_block(self) -> int:
        return self.block_size // self.group_size

    @property
    def symmetric(self) -> bool:
        return not self.minima

    def width(self, in_features: int) -> int:
        """Input channels that stand or fall together in a row: a block."""
        return self.block_size

    def groups(self, in_features: int) -> int:
        return in_features // self.group_size

    def bits_per_weight(self, in_features: int) -> float:
        return 8 * self.block_bytes / self.block_size

    def whole(self, multiples: Tensor) -> Tensor:
        """The nearest numbers that scales and minima may be."""
        return multiples.round_().clamp_(*(self.multiples or (0, 0)))

    @property
    def holds_codes(self) -> bool:
        """Whether there is one scale per block, and levels are evenly spaced."""
        return self.multiples is None and not self.curved


BLOCK_TYPES: dict[str, BlockSpec] = {
    spec.name: spec
    for spec in (
        BlockSpec("Q4_0", 32, 18, 32, 4, middle=8),
        BlockSpec("Q4_1", 32, 20, 32, 4, minima=True),
        BlockSpec("Q5_0", 32, 22, 32, 5, middle=16),
        BlockSpec("Q5_1", 32, 24, 32, 5, minima=True),
        BlockSpec("Q8_0", 32, 34, 32, 8, middle=128, lowest=1),
        BlockSpec("IQ4_NL", 32, 18, 32, 4, middle=8, curved=True),
        BlockSpec("Q2_K", 256, 84, 16, 2, multiples=(0, 15), minima=True),
        BlockSpec("Q3_K", 256, 110, 16, 3, middle=4, multiples=(-32, 31)),
        BlockSpec("Q4_K", 256, 144, 32, 4, multiples=(0, 63), minima=True),
        BlockSpec("Q5_K", 256, 176, 32, 5, multiples=(0, 63), minima=True),
        BlockSpec("Q6_K", 256, 210, 16, 6, middle=32, multiples=(-128, 127)),
        BlockSpec("IQ4_XS", 256, 136, 32, 4, middle=8, multiples=(-32, 31), curved=True),
    )
}
"""The types that can be rounded to, by name. Minima are multiples in the same range as scales."""


@dataclass(frozen=True)
class BlockGrid(Grid):
    """Fitted block grid of a matrix [out, in].

    d [out, blocks] float32 holding float16 values. multiples [out, groups] float32 whole numbers: the scale of a group
    is d * multiple; None where it is d. dmin, minima: the same for what is subtracted; both None for types without.
    """

    spec: BlockSpec
    d: Tensor
    multiples: Tensor | None = None
    dmin: Tensor | None = None
    minima: Tensor | None = None

    by_row: ClassVar[Mapping[str, str | None]] = {
        "d": "float16",
        "multiples": "int8",
        "dmin": "float16",
        "minima": "int8",
    }

    @property
    def scale(self) -> Tensor:
        """Scale of each group [out, groups]; may be zero or negative."""
        return _product(self.d, self.multiples)

    @property
    def offset(self) -> Tensor | None:
        return None if self.dmin is None else -_product(self.dmin, self.minima)

    @property
    def group_index(self) -> Tensor:
        groups = self.d.shape[1] * self.spec.groups_per_block
        return torch.arange(groups, device=self.d.device).repeat_interleave(self.spec.group_size)

    @property
    def table(self) -> Tensor | None:
        return torch.tensor(IQ4_LEVELS, dtype=torch.float32, device=self.d.device) if self.spec.curved else None

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        spec, scale = self.spec, self.scale
        least = torch.full_like(scale, spec.lowest - spec.middle)
        return least, torch.full_like(scale, spec.levels - 1 - spec.middle)

    def levels(self, codes: Tensor) -> Tensor:
        table = self.table
        return codes.to(torch.float32) - self.spec.middle if table is None else table[codes.long()]

    def codes(self, levels: Tensor) -> Tensor:
        """Codes uint8 of the levels [out, in] nearest to values given in units of the scale, offset removed."""
        if self.spec.curved:
            return level_table(IQ4_LEVELS, levels.device).codes(levels)
        codes = (levels + self.spec.middle).round_().clamp_(self.spec.lowest, self.spec.levels - 1)
        return codes.to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
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

    def of(self, parts: Mapping[str, Tensor]) -> Self:
        """A grid of this kind of other parts."""
        return type(self)(self.spec, **parts)

    @property
    def factor_index(self) -> Tensor:
        return torch.arange(self.d.shape[1], device=self.d.device).repeat_interleave(self.spec.block_size)

    def multiplied(self, factors: Tensor, scale_dtype: torch.dtype) -> Self:
        dmin = None if self.dmin is None else float16(self.dmin * factors)
        return replace(self, d=float16(self.d * factors), dmin=dmin)

    def refit(self, codes: Tensor, hessian: Tensor, gradient: Tensor, scale_dtype: torch.dtype) -> Coded:
        """Better scales, by descent on multiples and minima of groups, then on d and dmin of blocks, block by block."""
        return Coded(codes, _refitted(self, codes, hessian, gradient))


def whole_blocks(rows: Tensor, size: int, name: str) -> Tensor:
    """Rows of bytes [out, n] seen as blocks [out, n / size, size]; CheckpointError for rows that end within one."""
    count = rows.shape[1]
    if count % size:
        raise CheckpointError(
            f"a row of {count} bytes is no whole number of {name} blocks of {size} bytes",
            "the file may be cut off or its tensor type wrong",
        )
    return rows.reshape(len(rows), count // size, size)


def _product(unit: Tensor, multiples: Tensor | None) -> Tensor:
    if multiples is None:
        return unit
    return unit.repeat_interleave(multiples.shape[1] // unit.shape[1], dim=1) * multiples


def _refitted(grid: BlockGrid, codes: Tensor, hessian: Tensor, gradient: Tensor) -> BlockGrid:
    """The grid with better scales for fixed codes [out, in]; no step raises the loss of a row.

    A row's loss is (w - q) H (w - q)^T. A change of the values of one group or block, delta, lowers it by
    2 gradient . delta - delta H delta^T with gradient = (w - q) H; so each step is a parabola in one or two unknowns.
    """
    spec = grid.spec
    levels = grid.levels(codes)
    gradient = gradient.clone()
    parts = {name: tensor.clone() for name, tensor in grid.parts.items()}
    size = spec.block_size
    for block in range(codes.shape[1] // size):
        columns = slice(block * size, (block + 1) * size)
        here = _Block(
            grid.of({name: tensor[:, _share(tensor, grid, block)] for name, tensor in parts.items()}),
            levels[:, columns],
            gradient[:, columns].clone(),
            hessian[columns, columns],
        )
        moved = here.descend()
        for name, tensor in here.grid.parts.items():
            parts[name][:, _share(tensor, here.grid, block)] = tensor
        gradient[:, columns.stop :].addmm_(moved, hessian[columns, columns.stop :], alpha=-1)
    return grid.of(parts)


def _share(tensor: Tensor, grid: BlockGrid, block: int) -> slice:
    """Columns of one of a grid's tensors that belong to a block."""
    per = tensor.shape[1] // grid.d.shape[1]
    return slice(block * per, (block + 1) * per)


class _Block:
    """One block of every row: its grid, levels [out, size], gradient [out, size] and the Gram matrix of its columns."""

    def __init__(self, grid: BlockGrid, levels: Tensor, gradient: Tensor, hessian: Tensor) -> None:
        self.grid, self.levels, self.gradient, self.hessian = grid, levels, gradient, hessian

    def descend(self) -> Tensor:
        """Two rounds of groups, then the block; the change of the values [out, size]."""
        before = self._values()
        for _ in range(2):
            if self.grid.multiples is not None:
                self._groups()
            self._units()
        return self._values() - before

    def _values(self) -> Tensor:
        grid, size = self.grid, self.grid.spec.group_size
        value = self.levels * grid.scale.repeat_interleave(size, dim=1)
        return value if grid.offset is None else value + grid.offset.repeat_interleave(size, dim=1)

    def _groups(self) -> None:
        """Every multiple and minimum, one after another, to the whole number that is best for it alone."""
        grid, size = self.grid, self.grid.spec.group_size
        for group in range(grid.spec.groups_per_block):
            columns = slice(group * size, (group + 1) * size)
            directions = [(grid.multiples, self.levels[:, columns] * grid.d)]
            if grid.dmin is not None and grid.minima is not None:
                directions.append((grid.minima, (-grid.dmin).expand(-1, size)))
            for whole, direction in directions:
                assert whole is not None
                slope = (self.gradient[:, columns] * direction).sum(dim=1)
                bend = ((direction @ self.hessian[columns, columns]) * direction).sum(dim=1)
                step = torch.where(bend > 0, slope / bend, 0.0)
                new = grid.spec.whole(whole[:, group] + step)
                delta = direction * (new - whole[:, group]).unsqueeze(1)
                self.gradient.addmm_(delta, self.hessian[columns], alpha=-1)
                whole[:, group] = new

    def _units(self) -> None:
        """d and dmin together by least squares, rounded to float16; rows that would not gain keep theirs."""
        grid, size = self.grid, self.grid.spec.group_size
        per_d = self.levels if grid.multiples is None else self.levels * grid.multiples.repeat_interleave(size, dim=1)
        basis = [per_d]
        if grid.dmin is not None:
            least = torch.ones_like(per_d) if grid.minima is None else grid.minima.repeat_interleave(size, dim=1)
            basis.append(-least)
        old = torch.cat([grid.d] if grid.dmin is None else [grid.d, grid.dmin], dim=1)
        bent = [vector @ self.hessian for vector in basis]
        slope = torch.stack([(self.gradient * vector).sum(dim=1) for vector in basis], dim=1)
        square = torch.stack([torch.stack([(one * other).sum(dim=1) for other in basis], dim=1) for one in bent], dim=1)
        ridge = 1e-6 * square.diagonal(dim1=1, dim2=2).mean(dim=1).clamp_min(1e-30)
        eye = torch.eye(len(basis), device=old.device)
        step = torch.linalg.solve(square + ridge[:, None, None] * eye, slope)
        new = float16(old + torch.where(torch.isfinite(step), step, 0.0))
        if grid.minima is not None:  # engines take any sign, but a negative one is not what encoders write
            new[:, 1:].clamp_(min=0)
        change = new - old
        gain = (2 * slope - torch.einsum("rij,rj->ri", square, change)).mul_(change).sum(dim=1)
        change = torch.where(gain[:, None] > 0, change, 0.0)
        old += change
        grid.d.copy_(old[:, :1])
        if grid.dmin is not None:
            grid.dmin.copy_(old[:, 1:])
        delta = sum((change[:, i : i + 1] * vector for i, vector in enumerate(basis)), torch.zeros_like(per_d))
        self.gradient.addmm_(delta, self.hessian, alpha=-1)
