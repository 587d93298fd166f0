"""Grids: which values a weight may take. A spec is plain data; `integer.IntegerGrid` holds a matrix's tensors."""

from dataclasses import dataclass

from llmcompress.errors import RecipeError

INTEGER_BITS = (2, 3, 4, 5, 6, 8)
PER_ROW = -1


@dataclass(frozen=True)
class GridSpec:
    """An affine integer grid: w = scale * (code - zero_point), codes 0 ... 2^bits - 1.

    group_size: input channels that share a scale; -1 for one scale per output row. symmetric: every zero point is
    2^(bits-1). Raises RecipeError for widths or groups that do not exist.
    """

    bits: int
    group_size: int
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in INTEGER_BITS:
            raise RecipeError(
                f"integer grids have {', '.join(map(str, INTEGER_BITS))} bits, not {self.bits}", "choose one of them"
            )
        if self.group_size != PER_ROW and self.group_size < 1:
            raise RecipeError(
                f"group size {self.group_size} is not a size", "use a positive number, or -1 for one per row"
            )

    @property
    def name(self) -> str:
        group = "row" if self.group_size == PER_ROW else f"g{self.group_size}"
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
