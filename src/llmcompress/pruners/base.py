"""The base of pruners: options that a user sets, and the choice of the weights of a matrix that become zero."""

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from llmcompress.errors import RunError
from llmcompress.methods.base import Plain, Statistics

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.solve.prune import Pattern, Pruned
    from llmcompress.solve.sparsegpt import MaskChoice
    from llmcompress.workers import Workers


class Pruner(BaseModel):
    """Options of a pruner (a frozen pydantic model) and its algorithm, `prune`.

    A pruner file defines a subclass and names it `PRUNER`; every field becomes an option of the command of that name.
    undivided: fields that no pattern of `set` gives another value for some matrices.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str]
    summary: ClassVar[str]
    undivided: ClassVar[frozenset[str]] = frozenset({"allocation", "owl_threshold", "owl_span"})

    sparsity: float | None = Field(
        None, ge=0, lt=1, description="share of the weights of every matrix that become zero, such as 0.5"
    )
    pattern: str | None = Field(
        None,
        description="in place of a share: of every m consecutive inputs of a row n are kept, written n:m, such as 2:4",
    )
    allocation: Literal["uniform", "owl"] = Field(
        "uniform",
        description="the same sparsity for every layer, or less for layers with many outliers (OWL, measured on the "
        "calibration text)",
    )
    owl_threshold: float = Field(
        5.0,
        gt=0,
        le=1e6,
        description="times the mean of |w| * |x| of its matrix, above which a weight is an outlier to OWL",
    )
    owl_span: float = Field(
        0.08, gt=0, lt=0.5, description="half of what the sparsest layer has more than the least sparse one, with OWL"
    )
    refit: int = Field(
        0,
        ge=0,
        le=1000,
        description="steps of conjugate gradients by which kept weights make up for those that are gone",
    )
    percdamp: float = Field(
        0.01, gt=0, lt=1, description="added to the Hessian's diagonal, as a share of its mean, where it is used"
    )
    set: dict[str, dict[str, Plain]] = Field(
        default_factory=dict,
        description="other options for modules matching a pattern, such as 'mlp.down_proj: {sparsity: 0.4}'",
    )

    @field_validator("pattern")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        """ValueError unless the value is an n:m pattern."""
        if value is not None:
            found = re.fullmatch(r"(\d{1,2}):(\d{1,2})", value)
            if not found or not 0 < int(found[1]) < int(found[2]) <= 64:
                raise ValueError("a pattern is n:m with 0 < n < m <= 64: of every m weights, n are kept, such as 2:4")
        return value

    @field_validator("sparsity", mode="before")
    @classmethod
    def _share(cls, value: object) -> object:
        if isinstance(value, int | float) and value >= 1:
            raise ValueError("a share of the weights is meant, such as 0.5 for half of them")
        return value

    @model_validator(mode="after")
    def _either(self) -> "Pruner":
        """ValueError unless there is a sparsity or a pattern, and for options that contradict it."""
        if (self.sparsity is None) == (self.pattern is None):
            raise ValueError("say either sparsity or pattern, such as sparsity 0.5 or pattern 2:4")
        if self.pattern is not None and self.allocation != "uniform":
            raise ValueError(f"a pattern of {self.pattern} leaves no choice of sparsity to owl")
        if self.allocation != "owl" and (others := self.changed("owl_threshold", "owl_span")):
            raise ValueError(f"{others[0]} is an option of allocation owl")
        return self

    def changed(self, *names: str) -> list[str]:
        """Those of some fields that have another value than by default."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    @property
    def runs(self) -> "Pattern | None":
        """The pattern in numbers."""
        from llmcompress.solve.prune import Pattern

        if self.pattern is None:
            return None
        kept, of = self.pattern.split(":")
        return Pattern(int(kept), int(of))

    @property
    def share(self) -> float:
        """The share of weights that become zero."""
        if self.sparsity is not None:
            return self.sparsity
        runs = self.runs
        assert runs is not None
        return 1 - runs.kept / runs.of

    @property
    def label(self) -> str:
        """The pattern or sparsity for titles and file names: '2:4', '50%'."""
        return self.pattern or f"{100 * self.share:g}%"

    @property
    def by_row(self) -> bool:
        """Whether every row loses the same share."""
        return getattr(self, "compare", None) == "row"

    @property
    def needs_energy(self) -> bool:
        """Whether the pruner needs the mean square of every input channel."""
        return False

    @property
    def needs_gram(self) -> bool:
        """Whether the pruner needs the Gram matrix of the inputs."""
        return self.refit > 0

    @property
    def needs(self) -> frozenset[str]:
        """Names of the input statistics (stats/) that the pruner needs."""
        asked = {"gram": self.needs_gram, "squares": self.needs_energy}
        return frozenset(name for name, needed in asked.items() if needed)

    @property
    def needs_calibration(self) -> bool:
        """Whether the pruner needs text to run through the model."""
        return bool(self.needs) or self.allocation == "owl"

    @property
    def inverts(self) -> bool:
        """Whether the pruner inverts the Gram matrix of the inputs."""
        return False

    @property
    def within(self) -> "MaskChoice | None":
        """The choice of weights to be made by the rounding step instead; None if the pruner chooses by itself."""
        return None

    @property
    def original_samples(self) -> int:
        """The number of windows on which the pruner also needs the inputs of the uncompressed model."""
        return 0

    def prune(self, weights: "Sequence[Tensor]", stats: Statistics, workers: "Workers") -> "list[Pruned]":
        """Prune matrices [out, in] float32 that read one input with the statistics `stats`; `workers` share them."""
        from llmcompress.solve.damping import damped
        from llmcompress.solve.masked import refitted
        from llmcompress.solve.prune import Pruned

        hessian = None
        if self.refit:
            if stats.gram is None:
                raise RunError(f"{self.name} with refit needs the statistics of its inputs")
            hessian = damped(stats.gram.finish(), self.percdamp)

        def one(weight: "Tensor") -> "Pruned":
            keep = self.kept(weight, stats)
            if hessian is None:
                return Pruned(weight * keep, keep)
            return Pruned(refitted(weight, weight, keep, hessian, self.refit), keep)

        return workers.together(partial(one, weight) for weight in weights)

    def kept(self, weight: "Tensor", stats: Statistics) -> "Tensor":
        """Mask [out, in] of the weights [out, in] that stay."""
        raise TypeError(f"{self.name} has no algorithm")
