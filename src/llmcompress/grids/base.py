"""What a grid is as plain data: the values a weight may take (`Spec`), and what methods are asked about it.

One file of this package declares one grid and offers it as `GRID` (`grid_type`); nothing else lists them. The tensors
of a matrix on a grid are in `coded`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

PER_ROW = -1
PRODUCT_ROWS = 256  # at least at once for products with blocks of a Gram matrix

Clip = Literal["minmax", "search", "output"]
Search = Literal["compat", "fast", "best"]
CodeType = Literal["int", "fp8", "fp4"]
"""What the codes of inputs are: whole numbers of 8 bits, or floats of 8 or 4 bits."""


class Spec(ABC):
    """A grid as plain data: a frozen dataclass with its width in bits, its groups and its name.

    Callers ask for what a grid can do by the properties below, never for its class.
    """

    type: ClassVar[str]
    """Name of the `GridType`."""

    if TYPE_CHECKING:  # fields, properties or class variables of the dataclasses

        @property
        def name(self) -> str:
            """What recipes, reports and files call the grid; `spec_named` takes it back."""

        @property
        def bits(self) -> int:
            """Bits of a code."""

        @property
        def group_size(self) -> int:
            """Input channels that share a scale; -1 for one scale per output row."""

        @property
        def symmetric(self) -> bool:
            """Whether no group has a zero point, or a minimum, of its own."""

    @property
    def levels(self) -> int:
        """Codes that there are."""
        return 1 << self.bits

    @property
    def middle(self) -> int:
        """Zero point of a symmetric grid of whole numbers."""
        return 1 << (self.bits - 1)

    def width(self, in_features: int) -> int:
        """Input channels per group in a matrix with `in_features` of them."""
        return in_features if self.group_size == PER_ROW else self.group_size

    def groups(self, in_features: int) -> int:
        """Groups in a row of `in_features` channels."""
        return in_features // self.width(in_features)

    @abstractmethod
    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight, scales and all else that codes are decoded by included."""

    @property
    def affine(self) -> bool:
        """Whether w = scale * (code - zero_point), with a scale and a whole zero point stored for each group."""
        return False

    @property
    def scaled(self) -> bool:
        """Whether w = scale * level, in the way that engines describe by width, group size and symmetry alone."""
        return self.affine

    @property
    def zero_points(self) -> tuple[int, int] | None:
        """The least and the greatest zero point of a group; None where groups have none."""
        return None

    @property
    def tile(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale, where more than one row does; None for scales of each row."""
        return None

    @property
    def outliers(self) -> int:
        """Input channels that keep float16 weights beside the codes."""
        return 0

    @property
    def joins_rows(self) -> bool:
        """Whether the scales of a row depend on other rows of its matrix."""
        return False

    @property
    def joins_matrices(self) -> bool:
        """Whether matrices that read one input share what their scales are made of, as engines that fuse them need."""
        return False

    @property
    def together(self) -> int:
        """Input channels, one after another, whose codes are chosen as one."""
        return 1

    @property
    def unrounded(self) -> bool:
        """Whether it is no grid: values stay in the type that they are stored in."""
        return False

    @property
    def rounds_at_once(self) -> bool:
        """Whether plain rounding costs next to nothing, and is all there is to it: not tables, nor outliers."""
        return True

    @property
    def whole_width(self) -> bool:
        """Whether `bits` is the width that people call the grid by; types of GGUF have names instead."""
        return True

    def parts(self, rows: int, width: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Tensors that hold a matrix [rows, width], by name: their types in safetensors and shapes.

        None for grids whose tensors are a matter of formats; `Grid.packed` makes them.
        """
        return {}

    @property
    def gguf_type(self) -> str | None:
        """The tensor type of GGUF files whose values are those of the grid; None where there is none."""
        return None

    @property
    def holds_codes(self) -> bool:
        """Whether the grid has a place for codes of an affine grid, as `recode` takes them over."""
        return False


@dataclass(frozen=True)
class InputSpec:
    """How the inputs of a matrix are rounded: codes symmetric around zero.

    type: of the codes. dynamic: scales are found when a token comes, one for each `group` of its channels, or one for
    all; else something fixed is found by calibration and stored: the scale of all inputs, or with groups the divisor of
    scales that are floats of 8 bits. powers: scales are powers of two.
    """

    name: str
    type: CodeType
    dynamic: bool
    group: int | None = None
    powers: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.type == "fp4" else 8


INPUT_SPECS: dict[str, InputSpec] = {
    spec.name: spec
    for spec in (
        InputSpec("int8-token", "int", True),
        InputSpec("int8-tensor", "int", False),
        InputSpec("fp8-token", "fp8", True),
        InputSpec("fp8-tensor", "fp8", False),
        InputSpec("fp8-group", "fp8", True, 128),
        InputSpec("mxfp8", "fp8", True, 32, powers=True),
        InputSpec("mxfp4", "fp4", True, 32, powers=True),
        InputSpec("nvfp4", "fp4", False, 16),
    )
}
"""The ways to round inputs, by name."""


class GridOptions(BaseModel):
    """Options of one grid. Every method has the fields of all grids, beside those that all grids share."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class GridRequest(Protocol):
    """The options of a method that all grids share; those of a grid's own `options` are there as well."""

    @property
    def type(self) -> str: ...

    @property
    def bits(self) -> int: ...

    @property
    def group_size(self) -> int | None: ...

    @property
    def sym(self) -> bool: ...

    @property
    def activations(self) -> str: ...
