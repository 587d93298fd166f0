"""Grids: which values a weight may take. A spec is plain data; `integer` and `blocks` hold a matrix's tensors."""

import re
from dataclasses import dataclass
from typing import Literal

from llmcompress.errors import RecipeError

INTEGER_BITS = (2, 3, 4, 5, 6, 8)
PER_ROW = -1


CodeType = Literal["int", "fp8"]
"""What the codes of a grid are: whole numbers, or floats of 8 bits."""


@dataclass(frozen=True)
class GridSpec:
    """A grid of scaled codes. int: w = scale * (code - zero_point), codes 0 ... 2^bits - 1.

    fp8: w = scale * code, codes floats of the kind E4M3 (4 bits of exponent, 3 of mantissa, 448 at most).
    group_size: input channels that share a scale; -1 for one scale per output row. symmetric: every zero point is
    2^(bits-1). Raises RecipeError for widths or groups that do not exist.
    """

    bits: int
    group_size: int
    symmetric: bool = True
    type: CodeType = "int"

    def __post_init__(self) -> None:
        if self.type == "fp8":
            self._check_float()
        if self.bits not in INTEGER_BITS:
            raise RecipeError(
                f"integer grids have {', '.join(map(str, INTEGER_BITS))} bits, not {self.bits}", "choose one of them"
            )
        if self.group_size != PER_ROW and self.group_size < 1:
            raise RecipeError(
                f"group size {self.group_size} is not a size", "use a positive number, or -1 for one per row"
            )

    def _check_float(self) -> None:
        if self.bits != 8:
            raise RecipeError(f"codes of type fp8 have 8 bits, not {self.bits}", "use --bits 8, or --type int")
        if self.group_size != PER_ROW:
            raise RecipeError(
                f"codes of type fp8 have one scale per row, not per {self.group_size} inputs", "use --group-size -1"
            )
        if not self.symmetric:
            raise RecipeError("codes of type fp8 have no zero points", "use --sym, or --type int")

    @property
    def name(self) -> str:
        group = "row" if self.group_size == PER_ROW else f"g{self.group_size}"
        if self.type == "fp8":
            return f"fp8-{group}"
        return f"int{self.bits}-{group}-{'sym' if self.symmetric else 'asym'}"

    @property
    def levels(self) -> int:
        return 1 << self.bits

    @property
    def middle(self) -> int:
        """Zero point of a symmetric grid."""
        return 1 << (self.bits - 1)

    def width(self, in_features: int) -> int:
        """Input channels per group in a matrix with `in_features` of them."""
        return in_features if self.group_size == PER_ROW else self.group_size

    def groups(self, in_features: int) -> int:
        return in_features // self.width(in_features)

    def bits_per_weight(self, in_features: int, scale_bits: int = 16) -> float:
        """Stored bits per weight, scales and zero points included."""
        side = scale_bits + (0 if self.symmetric else self.bits)
        return self.bits + side / self.width(in_features)


@dataclass(frozen=True)
class InputSpec:
    """How the inputs of a matrix are rounded: codes of 8 bits, symmetric around zero.

    type: of the codes. dynamic: every token has a scale of its own, found when it comes; else one fixed scale serves
    all inputs.
    """

    type: CodeType
    dynamic: bool

    @property
    def name(self) -> str:
        return f"{'int8' if self.type == 'int' else self.type}-{'token' if self.dynamic else 'tensor'}"


INPUT_SPECS: dict[str, InputSpec] = {
    spec.name: spec
    for spec in (InputSpec("int", True), InputSpec("int", False), InputSpec("fp8", True), InputSpec("fp8", False))
}
"""The ways to round inputs, by name."""


@dataclass(frozen=True)
class BlockSpec:
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

    @property
    def levels(self) -> int:
        return 1 << self.bits

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
        """Stored bits per weight, scales included."""
        return 8 * self.block_bytes / self.block_size


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

Spec = GridSpec | BlockSpec


def spec_named(name: str) -> Spec:
    """The spec of a name that a spec gave; ValueError for any other."""
    if name in BLOCK_TYPES:
        return BLOCK_TYPES[name]
    if name == "fp8-row":
        return GridSpec(8, PER_ROW, type="fp8")
    found = re.fullmatch(r"int(\d)-(?:row|g(\d+))-(a?)sym", name)
    if found is None:
        raise ValueError(f"no grid is called {name!r}")
    return GridSpec(int(found[1]), int(found[2] or PER_ROW), not found[3])
