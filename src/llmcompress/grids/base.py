"""Grids: which values a weight may take. A spec is plain data; modules such as `integer` hold a matrix's tensors."""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from llmcompress.errors import RecipeError

INTEGER_BITS = (2, 3, 4, 5, 6, 8)
CODEBOOK_BITS = (2, 3, 4)
PROGRESSIVE_GROUPS = (32, 64, 128)
PER_ROW = -1
PRODUCT_ROWS = 256  # at least at once for products with blocks of a Gram matrix


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


@dataclass(frozen=True)
class Nf4Spec:
    """NF4 (QLoRA, arXiv:2305.14314, section 3): 16 quantiles of a normal distribution times the block's absmax.

    double: absmax is 8 bits of a nested block's, plus an offset of the whole matrix; else it is float32.
    """

    double: bool = True

    bits: ClassVar[int] = 4
    levels: ClassVar[int] = 16
    symmetric: ClassVar[bool] = True
    group_size: ClassVar[int] = 64
    nested: ClassVar[int] = 256

    @property
    def name(self) -> str:
        return "nf4-double" if self.double else "nf4"

    def width(self, in_features: int) -> int:
        return self.group_size

    def groups(self, in_features: int) -> int:
        return in_features // self.group_size

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight; the offset of the matrix and a nested block that is part empty are not counted."""
        return self.bits + ((8 + 32 / self.nested) if self.double else 32) / self.group_size


@dataclass(frozen=True)
class CodebookSpec:
    """A table of 2^bits float16 values for each output row (SqueezeLLM, arXiv:2306.07629)."""

    bits: int

    symmetric: ClassVar[bool] = True
    group_size: ClassVar[int] = PER_ROW

    def __post_init__(self) -> None:
        if self.bits not in CODEBOOK_BITS:
            raise RecipeError(
                f"codebooks have {', '.join(map(str, CODEBOOK_BITS))} bits, not {self.bits}", "choose one of them"
            )

    @property
    def name(self) -> str:
        return f"codebook{self.bits}-row"

    @property
    def levels(self) -> int:
        return 1 << self.bits

    def width(self, in_features: int) -> int:
        return in_features

    def groups(self, in_features: int) -> int:
        return 1

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight, the table included."""
        return self.bits + 16 * self.levels / in_features


@dataclass(frozen=True)
class Int8Spec:
    """LLM.int8() (arXiv:2208.07339): codes -127 ... 127 times the row's absmax / 127.

    outliers: input channels that keep float16 weights and inputs.
    """

    outliers: int = 0

    bits: ClassVar[int] = 8
    levels: ClassVar[int] = 256
    middle: ClassVar[int] = 128
    symmetric: ClassVar[bool] = True
    group_size: ClassVar[int] = PER_ROW

    @property
    def name(self) -> str:
        return f"int8-absmax-o{self.outliers}" if self.outliers else "int8-absmax"

    def width(self, in_features: int) -> int:
        return in_features

    def groups(self, in_features: int) -> int:
        return 1

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight, scale and outliers included."""
        return self.bits + (32 + 16 * self.outliers) / in_features


@dataclass(frozen=True)
class ProgressiveSpec:
    """4-bit codes of whole numbers of 8 bits (QServe, arXiv:2405.04532, section 4.1): w = (code - zero) * s1 * s0.

    s0: float16 scale of a row. s1: whole scale of a group, 1 ... 16. zero: of a group, 0 ... 15. (code - zero) * s1
    lies within -127 ... 127 whatever the code, so that a kernel's int8 never overflows.
    """

    group_size: int

    bits: ClassVar[int] = 4
    levels: ClassVar[int] = 16
    symmetric: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.group_size not in PROGRESSIVE_GROUPS:
            raise RecipeError(
                f"progressive grids have groups of {', '.join(map(str, PROGRESSIVE_GROUPS))}, not {self.group_size}",
                "choose one of them",
            )

    @property
    def name(self) -> str:
        return f"progressive-g{self.group_size}"

    def width(self, in_features: int) -> int:
        return self.group_size

    def groups(self, in_features: int) -> int:
        return in_features // self.group_size

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight: a float16 for each row, two bytes for each group."""
        return self.bits + 16 / self.group_size + 16 / in_features


@dataclass(frozen=True)
class DenseSpec:
    """No grid: the values that a tensor of this type may hold. dtype: BF16, F16, F32 or F64."""

    dtype: str

    symmetric: ClassVar[bool] = True
    group_size: ClassVar[int] = PER_ROW

    @property
    def name(self) -> str:
        return f"dense-{self.dtype.lower()}"

    @property
    def bits(self) -> int:
        return {"F32": 32, "F64": 64}.get(self.dtype, 16)

    @property
    def levels(self) -> int:
        return 1 << self.bits

    def width(self, in_features: int) -> int:
        return in_features

    def groups(self, in_features: int) -> int:
        return 1

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight; zeros take as much as any other."""
        return float(self.bits)


Spec = DenseSpec | GridSpec | BlockSpec | Nf4Spec | CodebookSpec | Int8Spec | ProgressiveSpec


def joins_rows(spec: Spec) -> bool:
    """Whether the scales of a row depend on other rows of its matrix, as those do that are quantised in their turn."""
    return isinstance(spec, Nf4Spec) and spec.double


def spec_named(name: str) -> Spec:
    """The spec of a name that a spec gave; ValueError for any other."""
    if name in BLOCK_TYPES:
        return BLOCK_TYPES[name]
    if name == "fp8-row":
        return GridSpec(8, PER_ROW, type="fp8")
    if found := re.fullmatch(r"int(\d)-(?:row|g(\d+))-(a?)sym", name):
        return GridSpec(int(found[1]), int(found[2] or PER_ROW), not found[3])
    if found := re.fullmatch(r"nf4(-double)?", name):
        return Nf4Spec(bool(found[1]))
    if found := re.fullmatch(r"codebook(\d)-row", name):
        return CodebookSpec(int(found[1]))
    if found := re.fullmatch(r"int8-absmax(?:-o(\d+))?", name):
        return Int8Spec(int(found[1] or 0))
    if found := re.fullmatch(r"progressive-g(\d+)", name):
        return ProgressiveSpec(int(found[1]))
    if found := re.fullmatch(r"dense-(bf16|f16|f32|f64)", name):
        return DenseSpec(found[1].upper())
    raise ValueError(f"no grid is called {name!r}")
