"""What a method is: options a user sets, and a way to choose the codes of one matrix from its input's statistics.

Methods see one weight and one Gram matrix. They know nothing of models, files, devices, processes or resuming.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from llmcompress.errors import RecipeError, RunError
from llmcompress.grids.base import (
    BLOCK_TYPES,
    CODEBOOK_BITS,
    INPUT_SPECS,
    CodebookSpec,
    GridSpec,
    InputSpec,
    Int8Spec,
    Nf4Spec,
    ProgressiveSpec,
    Spec,
    joins_rows,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.inputs import Seen
    from llmcompress.solve.prune import Pruned
    from llmcompress.solve.row_blocks import RowBlocks
    from llmcompress.solve.sparsegpt import Choice
    from llmcompress.stats.absmax import AbsMax
    from llmcompress.stats.drift import Drift
    from llmcompress.stats.energy import Energy
    from llmcompress.stats.gram import Gram

DEFAULT_GROUP_SIZES = (128, 64, 32)
GROUPED_TYPES = ("int", "progressive")  # whose group size can be chosen


def _plain(value: Any) -> Any:
    if not (value is None or isinstance(value, str | int) or (isinstance(value, float) and isfinite(value))):
        raise ValueError("an option is text, a finite number, true, false or nothing")
    return value


Plain = Annotated[Any, AfterValidator(_plain)]
"""The value of an option that nothing has checked yet: it must be something that JSON can say."""


@dataclass(frozen=True)
class Statistics:
    """What is known of an input: its Gram matrix, and its drift from the uncompressed model's; None where not asked.

    importance: mean square of each input channel [in] by an importance matrix that the user gave. range: its
    magnitudes, where its scale is fixed. peaks: the largest magnitude of each of its channels, where outliers are
    looked for. squares: of its channels, where no more of the Gram matrix is asked for.
    """

    gram: "Gram | None" = None
    drift: "Drift | None" = None
    importance: "Tensor | None" = None
    range: "Seen | None" = None
    peaks: "AbsMax | None" = None
    squares: "Energy | None" = None

    @property
    def energy(self) -> "Tensor | None":
        """Mean square of each channel [in] float32; None where nothing tells it."""
        if self.gram is not None:
            return self.gram.finish().diagonal()
        return None if self.squares is None else self.squares.mean()


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

    type: Literal["int", "fp8", "nf4", "codebook", "int8", "progressive"] = Field(
        "int",
        description="values a weight may take: integers times a scale, 8-bit floats (E4M3) times a scale per row, NF4 "
        "in blocks of 64, a table for each row, 8-bit integers of a row as LLM.int8() has them, or 4-bit codes of "
        "8-bit integers as QServe has them (always with zero points)",
    )
    bits: Literal[2, 3, 4, 5, 6, 8] = Field(4, description="bits per weight")
    group_size: int | None = Field(
        None,
        lt=1 << 31,
        description="input channels per scale; -1: one scale per row; default 128, or 64 or 32 where that divides",
    )
    sym: bool = Field(True, description="symmetric grid: every zero point is the middle code")
    clip: Literal["search", "output", "minmax"] = Field(
        "search",
        description="range of a group: searched for least squared error, or for least error of its output on "
        "calibration inputs (slower), or to cover every weight",
    )
    activations: Literal["none", "int8-token", "int8-tensor", "fp8-token", "fp8-tensor"] = Field(
        "none",
        description="round inputs too while the model runs: with a scale of each token's own, or with one for all "
        "tokens, measured on the calibration text without the first token of each window, whose magnitudes are apart",
    )
    activation_clip: Literal["absmax", "percentile", "mse"] = Field(
        "mse",
        description="range of inputs with one scale for all tokens: all that was seen, a percentile of all magnitudes, "
        "or the least squared error",
    )
    activation_percentile: float = Field(
        99.99, gt=50, le=100, description="the percentile of --activation-clip percentile"
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

    @model_validator(mode="after")
    def _consistent(self) -> "Method":
        """ValueError for options that contradict the type, which would else say nothing."""
        if self.clip == "output" and self.type != "int":
            raise ValueError(f"clip: output searches ranges of integers, not of type {self.type}")
        if self.outliers != "none" and self.type != "int8":
            raise ValueError("outliers are kept beside type int8 only")
        if self.gguf is not None and (self.type, self.outliers, self.activations) != ("int", "none", "none"):
            raise ValueError("types of GGUF stand in place of type, outliers and activations")
        bits = _BITS.get(self.type)
        if bits is not None:
            if self.bits not in bits:
                raise ValueError(f"type {self.type} has {' or '.join(map(str, bits))} bits, not {self.bits}")
            if self.type not in GROUPED_TYPES and (self.group_size is not None or not self.sym):
                raise ValueError(f"type {self.type} has neither group sizes nor zero points to choose")
        return self

    @property
    def grid(self) -> Spec:
        """The grid asked for; the group size, or the type of this very matrix, must have been resolved."""
        if self.gguf is not None:
            return BLOCK_TYPES[self.gguf.type]
        return _SPECS[self.type](self)

    @property
    def inputs(self) -> InputSpec | None:
        """How inputs are rounded; None for not at all."""
        return INPUT_SPECS.get(self.activations)

    @property
    def fixed_inputs(self) -> bool:
        """Whether inputs are rounded with a scale that is found by calibration."""
        return self.inputs is not None and not self.inputs.dynamic

    @property
    def label(self) -> str:
        """What codes it gives, for titles and file names: 'w4', 'w8a8', 'fp8', 'nf4-double'."""
        weights = f"w{self.bits}" if self.type == "int" else _LABELS.get(self.type) or self.grid.name
        if self.inputs is None:
            return weights
        return f"w{self.bits}a8" if self.inputs.type == self.type == "int" else f"{weights}-{self.activations}"

    @property
    def search(self) -> Literal["compat", "fast", "best"]:
        """How the scales of a block type are found."""
        return "best" if self.gguf is None else self.gguf.search

    @property
    def needs_gram(self) -> bool:
        """Whether `solve` goes by the Gram matrix of its inputs."""
        return True

    @property
    def needs_calibration(self) -> bool:
        """Whether text is run through the model: for the Gram matrix of inputs, their range, or their outliers."""
        return self.needs_gram or self.fixed_inputs or self.outliers != "none"

    @property
    def inverts(self) -> bool:
        """Whether `solve` inverts the Gram matrix of its inputs, for which it needs several of that size."""
        return self.needs_gram

    @property
    def joins_rows(self) -> bool:
        """Whether rows of one matrix share what scales are made of, so that each matrix is solved by itself."""
        return joins_rows(self.grid)

    @property
    def compensates(self) -> bool:
        """Whether the error of a column is made up for in the columns after it."""
        return False

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

    def solve(
        self,
        weight: "Tensor",
        stats: Statistics,
        scale_dtype: "torch.dtype",
        blocks: "RowBlocks",
        pruned: "Pruned | Choice | None" = None,
    ) -> Solved:
        """Codes of weight [out, in] float32 whose inputs have the statistics `stats`.

        blocks: how many rows are solved at once, and by whom. pruned: what a pruner made of `weight`, whose zeros stay
        zero on every grid that has one; or how to choose them meanwhile, for a method that `compensates`.
        """
        raise TypeError(f"{self.name} has no algorithm")

    def outlier_index(self, stats: Statistics) -> "tuple[Tensor | None, int]":
        """The outlier channels (solve/outliers.py), None where none are asked for; how many found no place."""
        if self.outliers == "none":
            return None, 0
        from llmcompress.solve.outliers import outlier_channels

        if stats.peaks is None:
            raise RunError("outliers cannot be told without statistics of the inputs")
        most = stats.peaks.channels
        if self.outliers == "topk":
            return outlier_channels(most, self.outlier_count), 0
        reached = int((most >= self.outlier_threshold).sum())
        index = outlier_channels(most, self.outlier_count, self.outlier_threshold)
        return index, max(0, reached - self.outlier_count)


def _group_size(method: Method) -> int:
    if method.group_size is None:
        raise RecipeError("the group size has not been resolved")
    return method.group_size


def _scaled(method: Method) -> Spec:
    return GridSpec(method.bits, _group_size(method), method.sym, "fp8" if method.type == "fp8" else "int")


_SPECS: Mapping[str, Callable[[Method], Spec]] = {
    "int": _scaled,
    "fp8": _scaled,
    "nf4": lambda method: Nf4Spec(method.double_quant),
    "codebook": lambda method: CodebookSpec(method.bits),
    "int8": lambda method: Int8Spec(0 if method.outliers == "none" else method.outlier_count),
    "progressive": lambda method: ProgressiveSpec(_group_size(method)),
}
"""What each `type` stands for."""

_BITS: Mapping[str, tuple[int, ...]] = {"nf4": (4,), "codebook": CODEBOOK_BITS, "int8": (8,), "progressive": (4,)}
"""Widths of types that have no others to choose."""

_LABELS: Mapping[str, str] = {"fp8": "fp8", "progressive": "progressive"}
"""Labels of types whose grid depends on a group size that may not be known yet."""
