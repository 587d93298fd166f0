"""A quantised matrix: codes on their grid, whatever the grid."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from llmcompress.grids.base import Spec
from llmcompress.lazy import Tensor, torch

if TYPE_CHECKING:
    from typing import Self

    from llmcompress.workers import Workers

Rescale = Callable[..., None]
"""What does as `rescale_` of grids/snapping.py, of the same arguments."""


@dataclass(frozen=True)
class Grid(ABC):
    """The fitted grid of a matrix [out, in]: what its codes are decoded by.

    Rounding by columns works on levels: what a code stands for in units of its group's scale, offset removed.
    by_row, shared: fields that hold a tensor with a row for each output, or one for all of them; each with the small
    type that it is stored in, None for its own.
    """

    by_row: ClassVar[Mapping[str, str | None]] = {}
    shared: ClassVar[Mapping[str, str | None]] = {}
    float8: ClassVar[bool] = False
    """Whether levels are floats of 8 bits (E4M3) within `bounds`, not whole numbers or those of a `table`."""

    if TYPE_CHECKING:  # fields or properties of the dataclasses

        @property
        def spec(self) -> Spec: ...

        @property
        def scale(self) -> Tensor:
            """Scale of each group [out, groups]."""

        @property
        def group_index(self) -> Tensor:
            """[in] int64: the group of each input channel."""

        @property
        def zero(self) -> Tensor:
            """Zero point of each group [out, groups] float32, where the spec has `zero_points`."""

        @property
        def centred(self) -> bool:
            """Whether every zero point is the middle code, of a grid of whole numbers."""

        @property
        def bounds(self) -> tuple[Tensor, Tensor]:
            """Least and largest level of each group [out, groups], where there is no table."""

    @property
    def offset(self) -> Tensor | None:
        """What is added to scale * level [out, groups], or None; a zero point is part of the level."""
        return None

    @property
    def table(self) -> Tensor | None:
        """Levels in ascending order, [levels] or [out, levels], where they are neither whole numbers nor floats."""
        return None

    def levels(self, codes: Tensor) -> Tensor:
        """Levels float32 of codes [out, in]; TypeError for a grid whose codes are the values themselves."""
        raise TypeError(f"{self.spec.name} has no levels")

    def codes(self, levels: Tensor) -> Tensor:
        """Codes uint8 of levels [out, in]; TypeError where there are no levels."""
        raise TypeError(f"{self.spec.name} has no levels")

    def snapped(self, units: Tensor, metric: Tensor, group: int) -> Tensor:
        """Levels [n, together] nearest to values in units of their scales [n, together], where the spec has `together`.

        metric [together, together]: errors e of a row cost e metric e^T. group: of the columns. TypeError for a grid of
        single codes.
        """
        raise TypeError(f"{self.spec.name} rounds its weights one by one")

    @abstractmethod
    def encode(self, weight: Tensor) -> Tensor:
        """Nearest codes of a whole matrix [out, in]."""

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """Values float32 of codes [out, in]: the formula every engine uses."""

    def numbers(self, codes: Tensor) -> bool:
        """Whether all codes [out, in] stand for numbers."""
        return True

    def refit(self, codes: Tensor, hessian: Tensor, gradient: Tensor, scale_dtype: torch.dtype) -> Coded:
        """Better scales or tables for fixed codes [out, in] on the full Gram matrix; no row gets worse.

        hessian [in, in]: damped. gradient [out, in]: (W - Q) H, with Q what codes stand for now. scale_dtype: in which
        scales are stored. TypeError for a grid without scales.
        """
        raise TypeError(f"{self.spec.name} has no scales")

    def refit_all(
        self,
        codes: Tensor,
        hessian: Tensor,
        gradient: Tensor,
        scale_dtype: torch.dtype,
        keep: Tensor | None = None,
        rescale: Rescale | None = None,
    ) -> Coded:
        """As `refit`, of grids that know how with other codes too. The gradient's memory may be given up for it.

        keep [out, in] float32: 1, or 0 for weights that are zero and stay so; None where none are. rescale: what
        chooses scales together with codes in place of `rescale_`.
        """
        return self.refit(codes, hessian, gradient, scale_dtype)

    @property
    def factor_index(self) -> Tensor | None:
        """[in] int64: the column of the factors that `multiplied` takes, by input channel; None where it takes none."""
        return None

    def multiplied(self, factors: Tensor, scale_dtype: torch.dtype) -> Self:
        """The grid whose values are those of this one times factors [out, columns], moved to storable scales.

        TypeError where no scale is free to be any number.
        """
        raise TypeError(f"the scales of {self.spec.name} are no free numbers")

    @property
    def gguf_factor(self) -> Tensor | None:
        """What GGUF files multiply the values of the rows by [1] float32, in a tensor of its own; None for nothing."""
        return None

    def gguf_rows(self, codes: Tensor) -> Tensor:
        """Rows of codes [out, in] as GGUF files hold them: uint8 [out, bytes]; TypeError where no type of GGUF does."""
        raise TypeError(f"GGUF has no type for {self.spec.name}")

    def beside_outliers(self, codes: Tensor, index: Tensor, outliers: Tensor, width: int) -> Coded:
        """The matrix [out, in = width] of which codes [out, in - n] are the rest.

        index [k] int64: the outlier channels, ascending, then -1 in free places; n of them are not. outliers [out, n].
        """
        raise TypeError(f"{self.spec.name} has no place for outliers")

    def packed(self, codes: Tensor) -> dict[str, Tensor]:
        """The tensors of codes [out, in] and this grid that `Spec.parts` names; `GridType.unpacked` takes them back."""
        raise TypeError(f"{self.spec.name} leaves its tensors to formats")

    def stored(self) -> dict[str, Tensor]:
        """Tensors that tell this grid from others of its spec, in small types; `GridType.restored` takes them back."""
        found = {name: (getattr(self, name), kept) for name, kept in {**self.by_row, **self.shared}.items()}
        return {
            # matrices may share what their rows share, and files may not
            name: part.to(part.dtype if kept is None else getattr(torch, kept), copy=name in self.shared)
            for name, (part, kept) in found.items()
            if part is not None
        }

    def to(self, device: torch.device | str) -> Self:
        """The same grid on another device."""
        return self._changed((*self.by_row, *self.shared), lambda part: part.to(device))

    def rows(self, index: slice | Tensor) -> Self:
        """The grid of some output rows."""
        return self._changed(tuple(self.by_row), lambda part: part[index])

    @classmethod
    def stacked(cls, grids: Sequence[Self]) -> Self:
        """The grid of matrices whose rows follow one another, or of parts of one matrix."""
        first = grids[0]
        joined = {
            name: torch.cat([getattr(grid, name) for grid in grids])
            for name in cls.by_row
            if getattr(first, name) is not None
        }
        return replace(first, **joined)

    def _changed(self, names: Sequence[str], change: Callable[[Tensor], Tensor]) -> Self:
        parts = {name: getattr(self, name) for name in names}
        return replace(self, **{name: change(part) for name, part in parts.items() if part is not None})


def wide(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stored tensors in the types that grids compute in: indices int64, all else float32."""
    return {
        name: part.to(torch.int64 if part.dtype in (torch.int32, torch.int64) else torch.float32)
        for name, part in parts.items()
    }


@dataclass(frozen=True)
class Coded:
    """Codes uint8 [out, in] on their grid; floats where nothing is rounded. What is stored is what the next layer sees.

    input_scale [1] float32: of the inputs, where these are rounded with a fixed one.
    """

    codes: Tensor
    grid: Grid
    input_scale: Tensor | None = None

    def decode(self) -> Tensor:
        """Values float32 [out, in]."""
        return self.grid.decode(self.codes)

    def rows(self, index: slice | Tensor) -> Coded:
        """Some output rows."""
        return replace(self, codes=self.codes[index], grid=self.grid.rows(index))

    def to(self, device: torch.device | str) -> Coded:
        """The same on another device."""
        scale = None if self.input_scale is None else self.input_scale.to(device)
        return Coded(self.codes.to(device), self.grid.to(device), scale)

    def stored(self) -> dict[str, Tensor]:
        """Tensors that, with the grid's spec, are all there is to it; `grid_type.restored` takes them back."""
        fixed = {} if self.input_scale is None else {"input_scale": self.input_scale}
        return {"codes": self.codes, **fixed, **self.grid.stored()}

    @classmethod
    def by_rows(cls, weight: Tensor, at_most: int, workers: Workers, coded: Callable[[Tensor], Coded]) -> Coded:
        """What `coded` makes of the rows of weight [out, in], of some `at_most` weights at once."""
        rows, width = weight.shape
        step = max(1, at_most // width)
        starts = range(0, max(rows, 1), step)
        return cls.stacked(list(workers.in_order(lambda start: coded(weight[start : start + step]), starts)))

    @classmethod
    def stacked(cls, parts: Sequence[Coded]) -> Coded:
        """One matrix of parts of its rows, which have grids of one kind."""
        if len(parts) == 1:
            return parts[0]
        grids = [part.grid for part in parts]
        return replace(parts[0], codes=torch.cat([part.codes for part in parts]), grid=grids[0].stacked(grids))
