"""A grid by its name: how methods ask for it, how it is fitted, and where all grids are found."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import llmcompress.grids
from llmcompress.grids.base import Clip, GridOptions, GridRequest, InputSpec, Search, Spec
from llmcompress.grids.coded import Coded, Grid
from llmcompress.registry import discover

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from llmcompress.stats.absmax import AbsMax
    from llmcompress.workers import Workers


@dataclass(frozen=True)
class Fitting:
    """How scales are chosen.

    importance [in]: what an error in an input channel costs. gram [in, in]: the Gram matrix of the inputs, for clip
    output. search: of types of GGUF. scale_dtype: in which scales are stored. order [in]: of channels in groups.
    """

    clip: Clip = "search"
    search: Search = "best"
    importance: Tensor | None = None
    gram: Tensor | None = None
    scale_dtype: torch.dtype | None = None
    order: Tensor | None = None


class GridType(ABC):
    """A grid by the name that recipes and `--type` give it; a grid's file defines a subclass and offers one as `GRID`.

    place: where it stands among others in help and messages. values: which values those are, for help. widths: bits it
    may have, None where its spec says what is wrong with others. grouped: whether group size and zero points can be
    chosen. group_sizes: sizes to suggest; per_row: whether one scale per row is one more. default_group: size where
    none is asked for; None: one that divides. chosen: whether by `--type`. clips: whether ranges go by `--clip`;
    output_clip: also by the error of outputs. options: fields that methods have because of it. formats: to suggest
    where another cannot hold it.
    """

    name: ClassVar[str]
    place: ClassVar[int]
    values: ClassVar[str] = ""
    widths: ClassVar[tuple[int, ...] | None] = None
    grouped: ClassVar[bool] = False
    group_sizes: ClassVar[tuple[int, ...]] = ()
    per_row: ClassVar[bool] = False
    default_group: ClassVar[int | None] = None
    chosen: ClassVar[bool] = True
    clips: ClassVar[bool] = True
    output_clip: ClassVar[bool] = False
    options: ClassVar[type[GridOptions] | None] = None
    formats: ClassVar[tuple[str, ...]] = ()
    pattern: ClassVar[str]
    """Of the names of its specs, for `re.fullmatch`."""

    @abstractmethod
    def named(self, found: re.Match[str]) -> Spec:
        """The spec whose name matches `pattern`."""

    def spec(self, asked: Any) -> Spec:
        """The spec that the options of a method stand for, once their group size is known."""
        raise TypeError(f"{self.name} is not asked for by options")

    def specs(self) -> list[Spec]:
        """All its specs, where they are few."""
        return []

    def listed(self) -> list[tuple[str, str]]:
        """Rows of `list grids`: a name, or a pattern of names, and what there is to say of it."""
        said = "{} levels; {:.3f} bits per weight at 4096 inputs"
        return [(spec.name, said.format(spec.levels, spec.bits_per_weight(4096))) for spec in self.specs()]

    def objection(self, asked: Any) -> str | None:
        """What contradicts itself in options of a method, whichever grid it asks for; None where nothing does."""
        return None

    def replaces(self, asked: Any) -> bool:
        """Whether this grid's own options ask for it, whatever `--type` says."""
        return False

    def label(self, asked: GridRequest, inputs: InputSpec | None) -> str:
        """What a method on the grid is called in titles and file names."""
        name = self.spec(asked).name
        return name if inputs is None else f"{name}-{inputs.name}"

    def group_label(self, asked: GridRequest) -> str:
        """What the label leaves open about groups."""
        return ""

    def refuse(self, asked: Any, module: str, width: int) -> None:  # noqa: B027 (most grids refuse nothing)
        """PlanError where a matrix [out, in = width] cannot have what is asked for, whatever its groups."""

    def search(self, asked: Any) -> Search:
        """How the scales of types of GGUF are found."""
        return "best"

    def is_compat(self, spec: Any) -> bool:
        """Whether it is known how llama-quantize rounds to a type of GGUF."""
        return True

    def needs_peaks(self, asked: Any) -> bool:
        """Whether the largest magnitude of each input channel is to be measured."""
        return False

    def kept_channels(self, asked: Any, peaks: AbsMax | None) -> tuple[Tensor | None, int]:
        """Input channels [outliers] int64 that keep 16 bits, None where none do; how many more found no place."""
        return None, 0

    def fit(self, weight: Tensor, spec: Any, how: Fitting) -> Grid:
        """Scales or tables for weight [out, in] float32; outliers apart, which must have been taken out of it."""
        raise TypeError(f"{self.name} has nothing to fit")

    def fit_beside(self, weight: Tensor, grid: Any, how: Fitting) -> Grid:
        """The grid of rows [some, in] whose weights have changed. grid: theirs before, with what other rows share."""
        found: Grid = grid
        return found

    def rounded(
        self, weight: Tensor, spec: Any, search: Search, workers: Workers, importance: Tensor | None
    ) -> Coded | None:
        """Codes and scales of weight [out, in] found together; None for a grid that is fitted before it is rounded to.

        importance [in]: what an error in an input channel costs.
        """
        return None

    def nearest(self, weight: Tensor, spec: Any, workers: Workers) -> Tensor:
        """weight [out, in] float32 rounded to nearest, ranges that cover every weight; float32 values."""
        grid = self.fit(weight, spec, Fitting(clip="minmax"))
        return grid.decode(grid.encode(weight))

    @abstractmethod
    def restored(self, spec: Any, width: int, parts: Mapping[str, Tensor]) -> Grid:
        """The grid [out, in = width] of what `Grid.stored` gave; KeyError or TypeError if parts lack something."""

    def of_gguf_rows(self, spec: Any, rows: Tensor) -> Coded:
        """The matrix of what `Grid.gguf_rows` gave, without its factor; CheckpointError for rows of partial blocks."""
        raise TypeError(f"GGUF has no type for {self.name}")

    def unpacked(self, spec: Any, parts: Mapping[str, Tensor]) -> Coded:
        """The matrix of what `Grid.packed` gave."""
        raise TypeError(f"{self.name} leaves its tensors to formats")


def grid_types() -> dict[str, GridType]:
    """All grids by name, in the order of help and messages."""
    found: dict[str, GridType] = discover(llmcompress.grids, "GRID")
    return dict(sorted(found.items(), key=lambda item: item[1].place))


def type_of(spec: Spec) -> GridType:
    """The grid that a spec belongs to."""
    found: GridType = discover(llmcompress.grids, "GRID")[spec.type]
    return found


def spec_named(name: str) -> Spec:
    """The spec of a name that a spec gave; ValueError for any other."""
    for grid in grid_types().values():
        if found := re.fullmatch(grid.pattern, name):
            return grid.named(found)
    raise ValueError(f"no grid is called {name!r}")


@cache
def gguf_specs() -> dict[str, Spec]:
    """The grids that GGUF has a tensor type for, by the name of the type."""
    specs = (spec for grid in grid_types().values() for spec in grid.specs())
    return {spec.gguf_type: spec for spec in specs if spec.gguf_type is not None}


def restored(spec: Spec, parts: Mapping[str, Tensor]) -> Coded:
    """The matrix of what `Coded.stored` gave; KeyError or TypeError if parts lack something."""
    parts = dict(parts)
    codes, scale = parts.pop("codes"), parts.pop("input_scale", None)
    return Coded(codes, type_of(spec).restored(spec, codes.shape[1], parts), scale)
