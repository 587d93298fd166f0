"""What a method is: options a user sets, and a way to choose the codes of one matrix from its input's statistics.

Methods see one weight and one Gram matrix. They know nothing of models, files, devices, processes or resuming.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from llmcompress.grids.base import INPUT_SPECS, InputSpec, Search, Spec
from llmcompress.grids.grid_type import GridType, grid_types

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.inputs import Seen
    from llmcompress.solve.prune import Pruned
    from llmcompress.solve.row_blocks import RowBlocks
    from llmcompress.solve.sparsegpt import MaskChoice
    from llmcompress.stats.absmax import AbsMax
    from llmcompress.stats.drift import Drift
    from llmcompress.stats.energy import Energy, Squares
    from llmcompress.stats.gram import Gram
    from llmcompress.stats.statistic import Accumulator, PairedAccumulator

DEFAULT_GROUP_SIZES = (128, 64, 32)


def _plain(value: Any) -> Any:
    if not (value is None or isinstance(value, str | int) or (isinstance(value, float) and isfinite(value))):
        raise ValueError("an option is text, a finite number, true, false or nothing")
    return value


Plain = Annotated[Any, AfterValidator(_plain)]
"""The value of an option that nothing has checked yet: it must be something that JSON can say."""
Shrinkage = Annotated[
    float | None,
    Field(
        ge=0,
        le=100,
        description="share of itself by which each entry of the Hessian's diagonal grows, so that correlations of "
        "channels in the calibration text count for less; left out: by how few tokens there are for each channel",
    ),
]
"""How far correlations are trusted, as `solve/shrinkage.py` has it."""


@dataclass(frozen=True)
class Statistics:
    """What is known of an input. found: accumulators of what was needed, by the name of the statistic (stats/).

    importance: mean square of each input channel [in] by an importance matrix that the user gave. outputs: mean
    products of the prediction's gradients at runs of the outputs, as `solve/output_feedback.py` has them.
    """

    found: "Mapping[str, Accumulator | PairedAccumulator]" = field(default_factory=dict)
    importance: "Tensor | None" = None
    outputs: "Sequence[Tensor] | None" = None

    @property
    def gram(self) -> "Gram | None":
        return cast("Gram | None", self.found.get("gram"))

    @property
    def drift(self) -> "Drift | None":
        """How the input has drifted from the uncompressed model's."""
        return cast("Drift | None", self.found.get("drift"))

    @property
    def range(self) -> "Seen | None":
        """Magnitudes of the input but for first tokens, by which a fixed scale of it is chosen."""
        return cast("Seen | None", self.found.get("magnitudes", self.found.get("absmax")))

    @property
    def peaks(self) -> "AbsMax | None":
        """The largest magnitude of each channel, by which outliers are told."""
        return cast("AbsMax | None", self.found.get("peaks"))

    @property
    def squares(self) -> "Energy | None":
        """Squares of each channel, where no more of the Gram matrix is needed."""
        squares = cast("Squares | None", self.found.get("squares"))
        return None if squares is None else squares.energy

    @property
    def energy(self) -> "Tensor | None":
        """Mean square of each channel [in] float32; None where nothing tells it."""
        if self.gram is not None:
            return self.gram.finish().diagonal()
        return None if self.squares is None else self.squares.mean()

    @property
    def dropped(self) -> int:
        """Tokens that the statistics of the input alone left out for inf or nan."""
        return max((getattr(accumulator, "dropped", 0) for accumulator in self.found.values()), default=0)


@dataclass(frozen=True)
class Solved:
    """Codes of a matrix, and what the method wants remembered about how it found them."""

    coded: "Coded"
    percdamp: float | None = None
    shrinkage: float | None = None
    dead_inputs: int = 0
    crowded_outliers: int = 0  # input channels that reached the threshold and found no place


def _values() -> str:
    """The values of all grids that --type names, for help."""
    *most, last = (f"{grid.name} ({grid.values})" for grid in grid_types().values() if grid.chosen)
    return f"{', '.join(most)}, or {last}"


if TYPE_CHECKING:
    TypeName = str
    InputsName = str
else:
    TypeName = Literal[tuple(name for name, grid in grid_types().items() if grid.chosen)]
    InputsName = Literal[("none", *INPUT_SPECS)]


class CommonOptions(BaseModel):
    """The options that all grids share: which one a method rounds to, and how its ranges are chosen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: TypeName = Field("int", description=f"values a weight may take: {_values()}")
    bits: Literal[2, 3, 4, 5, 6, 8] = Field(4, description="bits per weight, 4 if not said")
    group_size: int | None = Field(
        None,
        ge=-1,
        lt=1 << 31,
        description="input channels per scale; -1: one scale per row; default 128, or 64 or 32 where that divides",
    )
    sym: bool = Field(True, description="symmetric grid: every zero point is the middle code")
    clip: Literal["search", "output", "minmax"] = Field(
        "search",
        description="range of a group: searched for least squared error, or for least error of its output on "
        "calibration inputs (slower), or to cover every weight",
    )
    activations: InputsName = Field(
        "none",
        description="round inputs too while the model runs: with a scale of each token's own (or of each 128 of its "
        "channels: fp8-group; a power of two for each 32: mxfp8, mxfp4), or with one for all tokens, measured on the "
        "calibration text without the first token of each window, whose magnitudes are apart; nvfp4: a scale of each "
        "16 channels, over a divisor measured on all tokens",
    )
    activation_clip: Literal["absmax", "percentile", "mse"] = Field(
        "mse",
        description="range of inputs with one scale for all tokens: all that was seen, a percentile of all magnitudes, "
        "or the least squared error",
    )
    activation_percentile: float = Field(
        99.99, gt=50, le=100, description="the percentile of --activation-clip percentile"
    )


if TYPE_CHECKING:
    WithGridOptions = CommonOptions
else:

    class WithGridOptions(*(grid.options for grid in reversed(grid_types().values()) if grid.options), CommonOptions):
        """The options of each grid after those that all share; a model takes the fields of its last base first."""


class Method(WithGridOptions):
    """Options of a weight quantiser (a frozen pydantic model) and its algorithm, `solve`.

    A method file defines a subclass and names it `METHOD`; every field becomes an option of the command of that name.
    Options of one grid are fields too, and are declared in the file of that grid, which alone reads them. undivided:
    fields that no pattern of `set` gives another value for some matrices.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    undivided: ClassVar[frozenset[str]] = frozenset()

    set: dict[str, dict[str, Plain]] = Field(
        default_factory=dict,
        description="other options for modules matching a pattern, such as 'mlp.down_proj: {bits: 8}'",
    )

    @model_validator(mode="before")
    @classmethod
    def _only_width(cls, said: Any) -> Any:
        """What was said; where no width was, that of a type that has no other."""
        if not isinstance(said, Mapping) or said.get("bits") is not None:
            return said
        grid = grid_types().get(str(said.get("type")))
        only = {} if grid is None or grid.widths is None or len(grid.widths) > 1 else {"bits": grid.widths[0]}
        return {**{name: value for name, value in said.items() if name != "bits"}, **only}

    @model_validator(mode="after")
    def _consistent(self) -> "Method":
        """ValueError for options that contradict the type, which would else say nothing."""
        chosen = grid_types()[self.type]
        if self.clip == "output" and not chosen.output_clip:
            raise ValueError(f"clip: output searches ranges of integers, not of type {self.type}")
        if self.clip == "minmax" and not chosen.clips:
            raise ValueError(f"type {self.type} has no ranges, which clip: minmax is of")
        for said in filter(None, (grid.objection(self) for grid in grid_types().values())):
            raise ValueError(said)
        if chosen.widths is not None:
            if self.bits not in chosen.widths:
                raise ValueError(f"type {self.type} has {' or '.join(map(str, chosen.widths))} bits, not {self.bits}")
            # a type with a group of its own says itself what is wrong with others
            if not chosen.grouped and chosen.default_group is None and (self.group_size is not None or not self.sym):
                raise ValueError(f"type {self.type} has neither group sizes nor zero points to choose")
        return self

    @property
    def grid_type(self) -> GridType:
        """The grid asked for, whatever its groups."""
        known = grid_types()
        return next((grid for grid in known.values() if grid.replaces(self)), known[self.type])

    @property
    def grid(self) -> Spec:
        """The grid asked for; the group size, or the type of this very matrix, must have been resolved."""
        return self.grid_type.spec(self)

    @property
    def inputs(self) -> InputSpec | None:
        """How inputs are rounded; None for not at all."""
        return INPUT_SPECS.get(self.activations)

    @property
    def fixed_inputs(self) -> bool:
        """Whether inputs are rounded with a scale that is found by calibration."""
        return self.inputs is not None and not self.inputs.dynamic

    @property
    def divided_inputs(self) -> bool:
        """Whether what calibration finds is the divisor of scales of groups, which must hold first tokens as well."""
        return self.inputs is not None and self.inputs.group is not None and self.fixed_inputs

    def input_range(self, stats: Statistics) -> "Seen | None":
        """What was seen of the input, by which what is fixed of its rounding is chosen."""
        return stats.peaks if self.divided_inputs else stats.range

    @property
    def label(self) -> str:
        """What codes it gives, for titles and file names: 'w4', 'w8a8', 'fp8', 'nf4-double'."""
        return self.grid_type.label(self, self.inputs)

    @property
    def search(self) -> Search:
        """How the scales of a block type are found."""
        return self.grid_type.search(self)

    @property
    def needs_peaks(self) -> bool:
        """Whether the largest magnitude of each input channel is measured, for channels that keep 16 bits."""
        return self.grid_type.needs_peaks(self)

    @property
    def needs_gram(self) -> bool:
        """Whether `solve` goes by the Gram matrix of its inputs."""
        return True

    @property
    def needs(self) -> frozenset[str]:
        """Names of the statistics of its inputs (stats/) that it goes by."""
        ranged = self.fixed_inputs and not self.divided_inputs
        asked = {
            "gram": self.needs_gram,
            "absmax": ranged and self.activation_clip == "absmax",
            "magnitudes": ranged and self.activation_clip != "absmax",
            "peaks": self.needs_peaks or self.divided_inputs,
        }
        return frozenset(name for name, needed in asked.items() if needed)

    @property
    def needs_calibration(self) -> bool:
        """Whether text is run through the model for it."""
        return bool(self.needs)

    @property
    def inverts(self) -> bool:
        """Whether `solve` inverts the Gram matrix of its inputs, for which it needs several of that size."""
        return self.needs_gram

    @property
    def joins_rows(self) -> bool:
        """Whether rows share what scales are made of, so that the scales of a matrix are fitted at once."""
        return self.grid.joins_rows

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

    @property
    def follows_gradients(self) -> bool:
        """Whether it goes by what errors at tokens and outputs do to the prediction."""
        return False

    @property
    def recovers(self) -> bool:
        """Whether scales, and gains of norms, are fitted to what leaves a layer once its codes are chosen."""
        return False

    def solve(
        self,
        weight: "Tensor",
        stats: Statistics,
        scale_dtype: "torch.dtype",
        blocks: "RowBlocks",
        pruned: "Pruned | MaskChoice | None" = None,
    ) -> Solved:
        """Codes of weight [out, in] float32 whose inputs have the statistics `stats`.

        blocks: how many rows are solved at once, and by whom. pruned: what a pruner made of `weight`, whose zeros stay
        zero on every grid that has one; or how to choose them meanwhile, for a method that `compensates`.
        """
        raise TypeError(f"{self.name} has no algorithm")

    def kept_channels(self, stats: Statistics) -> "tuple[Tensor | None, int]":
        """Input channels that keep 16 bits (solve/outliers.py), None where none do; how many more found no place."""
        return self.grid_type.kept_channels(self, stats.peaks)
