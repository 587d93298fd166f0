"""Tensor types and file types of GGUF: their names, numbers and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from llmcompress.errors import RecipeError
from llmcompress.registry import suggest

_TENSOR_TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
    "NVFP4",
)  # fmt: skip


@dataclass(frozen=True)
class TensorType:
    """How the values of a tensor are stored.

    id: the number of the type in files (gguf.GGMLQuantizationType). block: consecutive values of a row that are stored
    together. block_bytes: bytes of such a block.
    """

    name: str
    id: int
    block: int
    block_bytes: int

    @property
    def quantised(self) -> bool:
        return self.block > 1

    def fits(self, width: int) -> bool:
        """Whether a row of `width` values is made of whole blocks."""
        return width % self.block == 0

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of this shape, the last extent being the row; ValueError if blocks do not divide it."""
        if not self.fits(shape[-1]):
            raise ValueError(f"{self.name} has blocks of {self.block} values, a row of {shape[-1]} is none of them")
        return prod(shape) // self.block * self.block_bytes


@dataclass(frozen=True)
class FileType:
    """A named mixture of tensor types.

    id: number under which files declare it (general.file_type). default: name of the tensor type of most matrices.
    """

    name: str
    id: int
    default: str


FILE_TYPES = {
    kind.name: kind
    for kind in (
        FileType("F32", 0, "F32"),
        FileType("F16", 1, "F16"),
        FileType("BF16", 32, "BF16"),
        FileType("Q4_0", 2, "Q4_0"),
        FileType("Q4_1", 3, "Q4_1"),
        FileType("Q5_0", 8, "Q5_0"),
        FileType("Q5_1", 9, "Q5_1"),
        FileType("Q8_0", 7, "Q8_0"),
        FileType("Q2_K", 10, "Q2_K"),
        FileType("Q2_K_S", 21, "Q2_K"),
        FileType("Q3_K_S", 11, "Q3_K"),
        FileType("Q3_K_M", 12, "Q3_K"),
        FileType("Q3_K_L", 13, "Q3_K"),
        FileType("Q4_K_S", 14, "Q4_K"),
        FileType("Q4_K_M", 15, "Q4_K"),
        FileType("Q5_K_S", 16, "Q5_K"),
        FileType("Q5_K_M", 17, "Q5_K"),
        FileType("Q6_K", 18, "Q6_K"),
        FileType("IQ1_S", 24, "IQ1_S"),
        FileType("IQ1_M", 31, "IQ1_M"),
        FileType("IQ2_XXS", 19, "IQ2_XXS"),
        FileType("IQ2_XS", 20, "IQ2_XS"),
        FileType("IQ2_S", 28, "IQ2_XS"),
        FileType("IQ2_M", 29, "IQ2_S"),
        FileType("IQ3_XXS", 23, "IQ3_XXS"),
        FileType("IQ3_XS", 22, "IQ3_S"),
        FileType("IQ3_S", 26, "IQ3_S"),
        FileType("IQ3_M", 27, "IQ3_S"),
        FileType("IQ4_NL", 25, "IQ4_NL"),
        FileType("IQ4_XS", 30, "IQ4_XS"),
        FileType("TQ1_0", 36, "TQ1_0"),
        FileType("TQ2_0", 37, "TQ2_0"),
        FileType("MXFP4", 38, "MXFP4"),
        FileType("MXFP4_MOE", 38, "MXFP4"),
        FileType("NVFP4", 39, "NVFP4"),
    )
}
FACTORED = frozenset({"NVFP4"})
"""Types whose tensors come with another that holds the factor of each matrix (`factor_name`)."""
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


def factor_name(name: str) -> str:
    """The name of the tensor that holds the factors of a tensor of a type of FACTORED."""
    return f"{name.removesuffix('.weight')}.scale"


def tensor_type(name: str) -> TensorType:
    """The tensor type of a name, in any case; RecipeError with a suggestion if there is none."""
    known = _tensor_types()
    if name.upper() not in known:
        raise RecipeError(f"unknown tensor type {name!r}", suggest(name.upper(), list(known)))
    return known[name.upper()]


def file_type(name: str) -> FileType:
    """The file type of a name or alias, in any case; RecipeError with a suggestion if there is none."""
    upper = name.upper()
    if ALIASES.get(upper, upper) not in FILE_TYPES:
        raise RecipeError(f"unknown GGUF file type {name!r}", suggest(upper, [*FILE_TYPES, *ALIASES]))
    return FILE_TYPES[ALIASES.get(upper, upper)]


@cache
def _tensor_types() -> dict[str, TensorType]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kinds = [GGMLQuantizationType[name] for name in _TENSOR_TYPES]
    return {kind.name: TensorType(kind.name, int(kind), *GGML_QUANT_SIZES[kind]) for kind in kinds}
