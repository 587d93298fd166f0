"""What a method is: options a user sets, and a way to choose the codes of one matrix from its input's statistics.

Methods see one weight and one Gram matrix. They know nothing of models, files, devices or resuming.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from llmcompress.errors import RecipeError, RunError
from llmcompress.grids.base import BLOCK_TYPES, CODEBOOK_BITS, CodebookSpec, GridSpec, Int8Spec, Nf4Spec, Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from llmcompress.grids.coded import Coded
    from llmcompress.stats.drift import Drift
    from llmcompress.stats.gram import Gram

DEFAULT_GROUP_SIZES = (128, 64, 32)
SOLVED_ROWS = 1536  # at once by a thread: with fewer, the calls for each column would cost more than their arithmetic


def _plain(value: Any) -> Any:
    if not (value is None or isinstance(value, str | int) or (isinstance(value, float) and isfinite(value))):
        raise ValueError("an option is text, a finite number, true, false or nothing")
    return value


Plain = Annotated[Any, AfterValidator(_plain)]
"""The value of an option that nothing has checked yet: it must be something that JSON can say."""


@dataclass(frozen=True)
class Statistics:
    """What is known of an input: its Gram matrix, and its drift from the uncompressed model's; None where not asked.

    importance: mean square of each input channel [in] by an importance matrix that the user gave. absmax: largest
    magnitude of each input channel [in].
    """

    gram: "Gram | None" = None
    drift: "Drift | None" = None
    importance: "Tensor | None" = None
    absmax: "Tensor | None" = None


@dataclass(frozen=True)
class Solved:
    """Codes of a matrix, and what the method wants remembered about how it found them."""

    coded: "Coded"
    percdamp: float | None = None
    dead_inputs: int = 0
    crowded_outliers: int = 0  # input channels that reached the threshold and found no place


class GgufTypes(BaseModel):
    """Types of GGUF in place of bits and groups.

    type: a mixture such as Q4_K_M, or, for one matrix, a tensor type such as Q6_K. pure: its default type everywhere.
    output, embedding: tensor types of the head and of the embedding. tensors: tensor types by pattern of GGUF names.
    search: how scales are found (grids/encoders.py). allow_requantize: whether what is quantised already in a GGUF file
    may be decoded and rounded anew.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    pure: bool = False
    output: str | None = None
    embedding: str | None = None
    tensors: dict[str, str] = Field(default_factory=dict)
    search: Literal["compat", "fast", "best"] = "best"
    allow_requantize: bool = False


class Method(BaseModel):
    """Options of a weight quantiser (a frozen pydantic model) and its algorithm, `solve`.

    A method file defines a subclass and names it `METHOD`; every field becomes an option of the command of that name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str]
    summary: ClassVar[str]
    needs_calibration: ClassVar[bool]

    type: Literal["int", "nf4", "codebook", "int8"] = Field(
        "int",
        description="values a weight may take: integers times a scale, NF4 in blocks of 64, a table for each row, or "
        "8-bit integers of a row as LLM.int8() has them",
    )
    bits: Literal[2, 3, 4, 5, 6, 8] = Field(4, description="bits per weight")
    group_size: int | None = Field(
        None,
        lt=1 << 31,
        description="input channels per scale; -1: one scale per row; default 128, or 64 or 32 where that divides",
    )
    sym: bool = Field(True, description="symmetric grid: every zero point is the middle code")
    clip: Literal["search", "minmax"] = Field(
        "search", description="range of a group: searched for least squared error, or to cover every weight"
    )
    double_quant: bool = Field(True, description="quantise the scales of nf4 in their turn")
    outliers: Literal["none", "threshold", "topk"] = Field(
        "none", description="input channels of int8 that stay in 16 bits: those that reach a threshold, or the largest"
    )
    outlier_threshold: float = Field(6.0, gt=0, description="magnitude that makes an input an outlier")
    outlier_count: int = Field(16, ge=1, description="input channels that stay in 16 bits at most")
    gguf: GgufTypes | None = Field(None, description="types of GGUF in place of bits and groups")
    set: dict[str, dict[str, Plain]] = Field(
        default_factory=dict,
        description="other options for modules matching a pattern, such as 'mlp.down_proj: {bits: 8}'",
    )

    @property
    def grid(self) -> Spec:
        """The grid asked for; the group size, or the type of this very matrix, must have been resolved."""
        if self.gguf is not None:
            return BLOCK_TYPES[self.gguf.type]
        return _SPECS[self.type](self)

    @model_validator(mode="after")
    def _consistent(self) -> "Method":
        """ValueError for options that contradict the type, which would else say nothing."""
        if self.outliers != "none" and self.type != "int8":
            raise ValueError("outliers are kept beside type int8 only")
        if self.type != "int":
            bits = {"nf4": (4,), "codebook": CODEBOOK_BITS, "int8": (8,)}[self.type]
            if self.bits not in bits:
                raise ValueError(f"type {self.type} has {' or '.join(map(str, bits))} bits, not {self.bits}")
            if self.group_size is not None or not self.sym:
                raise ValueError(f"type {self.type} has neither group sizes nor zero points to choose")
        return self

    @property
    def calibrated(self) -> bool:
        """Whether statistics of inputs are wanted: by the method itself, or to find outliers."""
        return self.needs_calibration or self.outliers != "none"

    @property
    def search(self) -> Literal["compat", "fast", "best"]:
        """How the scales of a block type are found."""
        return "best" if self.gguf is None else self.gguf.search

    @property
    def permutes_groups(self) -> bool:
        """Whether groups follow the activation order, so that files need a group index."""
        return False

    def described(self) -> dict[str, Any]:
        """What a format's config may want to say about the method."""
        return {}

    @property
    def original_samples(self) -> int:
        """On how many windows the inputs of the uncompressed model are wanted beside those of the compressed one."""
        return 0

    def solve(self, weight: "Tensor", stats: Statistics, scale_dtype: "torch.dtype") -> Solved:
        """Codes of weight [out, in] float32 whose inputs have the statistics `stats`."""
        raise TypeError(f"{self.name} has no algorithm")

    def outlier_index(self, stats: Statistics) -> "tuple[Tensor | None, int]":
        """The outlier channels (solve/outliers.py), None where none are asked for; how many found no place."""
        if self.outliers == "none":
            return None, 0
        from llmcompress.solve.outliers import outlier_channels

        if stats.absmax is None:
            raise RunError("outliers cannot be told without statistics of the inputs")
        if self.outliers == "topk":
            return outlier_channels(stats.absmax, self.outlier_count), 0
        reached = int((stats.absmax >= self.outlier_threshold).sum())
        index = outlier_channels(stats.absmax, self.outlier_count, self.outlier_threshold)
        return index, max(0, reached - self.outlier_count)


def _integers(method: Method) -> Spec:
    if method.group_size is None:
        raise RecipeError("the group size has not been resolved")
    return GridSpec(method.bits, method.group_size, method.sym)


_SPECS: Mapping[str, Callable[[Method], Spec]] = {
    "int": _integers,
    "nf4": lambda method: Nf4Spec(method.double_quant),
    "codebook": lambda method: CodebookSpec(method.bits),
    "int8": lambda method: Int8Spec(0 if method.outliers == "none" else method.outlier_count),
}
"""What each `type` stands for."""
