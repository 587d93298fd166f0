"""The grid of LLM.int8(): rows of codes -127 ... 127, decoded as bitsandbytes does, beside outlier channels.

W[n, k] = code[n, k] * absmax[n] * (1 / 127), the last factor as float32. Outlier channels hold float16 weights: their
codes are zero and they do not widen the absmax (arXiv:2208.07339, section 3, with channels chosen beforehand).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from llmcompress.errors import PlanError, RunError
from llmcompress.grids.base import PER_ROW, Clip, GridOptions, Spec
from llmcompress.grids.coded import Coded
from llmcompress.grids.errors import positive
from llmcompress.grids.grid_type import Fitting, GridType
from llmcompress.grids.scales import ScaledGrid, float16
from llmcompress.hardware import at_once
from llmcompress.lazy import Tensor, torch

if TYPE_CHECKING:
    from llmcompress.stats.absmax import AbsMax

_STEP = 0.007874015718698502  # 1 / 127, as bitsandbytes has it
_LIMIT = 127
_SHRINKS = (0.97, 0.94, 0.91, 0.88)
_CHUNK = 1 << 17  # weights searched at once: the temporaries stay in the cache


@dataclass(frozen=True)
class Int8Spec(Spec):
    """LLM.int8() (arXiv:2208.07339): codes -127 ... 127 times the row's absmax / 127.

    outliers: input channels that keep float16 weights and inputs.
    """

    outliers: int = 0

    type: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    symmetric: ClassVar[bool] = True
    group_size: ClassVar[int] = PER_ROW

    @property
    def name(self) -> str:
        return f"int8-absmax-o{self.outliers}" if self.outliers else "int8-absmax"

    @property
    def rounds_at_once(self) -> bool:
        return self.outliers == 0

    def bits_per_weight(self, in_features: int) -> float:
        """Stored bits per weight, scale and outliers included."""
        return self.bits + (32 + 16 * self.outliers) / in_features


@dataclass(frozen=True)
class Int8Grid(ScaledGrid):
    """Fitted grid of a matrix [out, in = width]. absmax [out, 1] float32.

    index [k] int64: the outlier channels, ascending, then -1 in places that are free. outliers [out, k] float32 holding
    float16 values. Both have k = 0 for a spec without outliers.
    """

    spec: Int8Spec
    width: int
    absmax: Tensor
    index: Tensor
    outliers: Tensor

    by_row: ClassVar[Mapping[str, str | None]] = {"absmax": None, "outliers": "float16"}
    shared: ClassVar[Mapping[str, str | None]] = {"index": "int32"}

    @property
    def scale(self) -> Tensor:
        return self.absmax * _STEP

    @property
    def group_index(self) -> Tensor:
        return torch.zeros(self.width, dtype=torch.int64, device=self.absmax.device)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        most = torch.full_like(self.absmax, _LIMIT)
        return -most, most

    def levels(self, codes: Tensor) -> Tensor:
        return codes.to(torch.float32) - self.spec.middle

    def codes(self, levels: Tensor) -> Tensor:
        return (levels + self.spec.middle).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        value = self.levels(codes).mul_(self.absmax).mul_(_STEP)
        held = self.index >= 0
        value[:, self.index[held]] = self.outliers[:, held]
        return value

    def encode(self, weight: Tensor) -> Tensor:
        """Nearest codes uint8 of a whole matrix [out, in]; level zero where a row's absmax is, and in outliers."""
        inverse = torch.where(self.absmax == 0, 0.0, _LIMIT / self.absmax)
        levels = (weight * inverse).round_().clamp_(-_LIMIT, _LIMIT)
        levels[:, self.index[self.index >= 0]] = 0
        return self.codes(levels)

    @property
    def factor_index(self) -> None:  # the scale does not multiply outliers
        return None

    def rescaled(self, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> Int8Grid:
        return replace(self, absmax=torch.where(rows[:, None], scale * _LIMIT, self.absmax))

    def beside_outliers(self, codes: Tensor, index: Tensor, outliers: Tensor, width: int) -> Coded:
        held = index[index >= 0]
        rest = torch.ones(width, dtype=torch.bool, device=codes.device)
        rest[held] = False
        spread = torch.full((codes.shape[0], width), self.spec.middle, dtype=torch.uint8, device=codes.device)
        spread[:, rest] = codes
        kept = torch.zeros(codes.shape[0], index.numel(), device=codes.device)
        kept[:, : held.numel()] = float16(outliers)
        return Coded(spread, Int8Grid(Int8Spec(index.numel()), width, self.absmax, index, kept))

    def stored(self) -> dict[str, Tensor]:
        return {"width": torch.tensor(self.width), **super().stored()}


class Int8Options(GridOptions):
    """Options of int8."""

    outliers: Literal["none", "threshold", "topk"] = Field(
        "none", description="input channels of int8 that stay in 16 bits: those that reach a threshold, or the largest"
    )
    outlier_threshold: float = Field(6.0, gt=0, le=1e9, description="magnitude that makes an input an outlier")
    outlier_count: int = Field(16, ge=1, le=1 << 20, description="input channels that stay in 16 bits at most")


class Int8(GridType):
    """Whole numbers of 8 bits of a row, as LLM.int8() has them."""

    name = "int8"
    place = 4
    values = "8-bit integers of a row as LLM.int8() has them"
    pattern = r"int8-absmax(?:-o(\d+))?"
    widths = (8,)
    options = Int8Options
    formats = ("bitsandbytes", "int8-outliers")

    def named(self, found: re.Match[str]) -> Spec:
        return Int8Spec(int(found[1] or 0))

    def spec(self, asked: Any) -> Spec:
        return Int8Spec(0 if asked.outliers == "none" else asked.outlier_count)

    def specs(self) -> list[Spec]:
        return [Int8Spec()]

    def objection(self, asked: Any) -> str | None:
        misplaced = asked.outliers != "none" and asked.type != self.name
        return "outliers are kept beside type int8 only" if misplaced else None

    def refuse(self, asked: Any, module: str, width: int) -> None:
        if asked.outliers != "none" and asked.outlier_count >= width:
            raise PlanError(
                f"{asked.outlier_count} outlier channels leave nothing to round of the {width} inputs of {module}",
                f"use an outlier_count below {width}, or leave the matrix out: --set 'PATTERN: {{skip: true}}'",
            )

    def needs_peaks(self, asked: Any) -> bool:
        return bool(asked.outliers != "none")

    def kept_channels(self, asked: Any, peaks: AbsMax | None) -> tuple[Tensor | None, int]:
        if asked.outliers == "none":
            return None, 0
        if peaks is None:
            raise RunError("outliers cannot be told without statistics of the inputs")
        most = peaks.channels
        if asked.outliers == "topk":
            return outlier_channels(most, asked.outlier_count), 0
        reached = int((most >= asked.outlier_threshold).sum())
        index = outlier_channels(most, asked.outlier_count, asked.outlier_threshold)
        return index, max(0, reached - asked.outlier_count)

    def fit(self, weight: Tensor, spec: Int8Spec, how: Fitting) -> Int8Grid:
        return fit(weight, clip=how.clip, importance=how.importance)

    def restored(self, spec: Int8Spec, width: int, parts: Mapping[str, Tensor]) -> Int8Grid:
        index, outliers = parts["index"].to(torch.int64), parts["outliers"].to(torch.float32)
        return Int8Grid(spec, width, parts["absmax"], index, outliers)


GRID = Int8()


def outlier_channels(absmax: Tensor, count: int, threshold: float = 0.0) -> Tensor:
    """The `count` channels of largest absmax [in] among those that reach `threshold`: [count] int64.

    Ascending, then -1 in places that are free. Ties go to the lower channel.
    """
    ranked = torch.argsort(absmax, descending=True, stable=True)[:count]
    held = ranked[absmax[ranked] >= threshold].sort().values
    index = torch.full((count,), -1, dtype=torch.int64, device=absmax.device)
    index[: held.numel()] = held
    return index


def fit(weight: Tensor, *, clip: Clip = "search", importance: Tensor | None = None) -> Int8Grid:
    """Choose the scales of weight [out, in] float32, none of whose channels are outliers.

    minmax: the absmax, as bitsandbytes takes it. search: what loses least squared error, each input channel weighted
    by importance [in]; absmax is a candidate.
    """
    width = weight.shape[1]
    weigh = positive(torch.ones(width, device=weight.device) if importance is None else importance.to(torch.float32))
    parts = torch.split(weight, max(1, at_once(weight, _CHUNK) // width))
    scales = [part.abs().amax(1, keepdim=True) if clip == "minmax" else _searched(part, weigh) for part in parts]
    none = torch.empty(0, dtype=torch.int64, device=weight.device)
    return Int8Grid(Int8Spec(), width, torch.cat(scales), none, weight.new_empty(weight.shape[0], 0))


def _searched(weight: Tensor, weigh: Tensor) -> Tensor:
    """absmax [rows, 1] of weight [rows, in] by weighted least squares."""
    largest = weight.abs().amax(1, keepdim=True)
    best, least = largest, torch.full_like(largest, torch.inf)
    for shrink in (1.0, *_SHRINKS):
        tried = largest * shrink
        scale = tried * _STEP
        levels = (weight * torch.where(scale == 0, 0.0, 1 / scale)).round_().clamp_(-_LIMIT, _LIMIT)
        loss = (levels.mul_(scale).sub_(weight).square_() @ weigh).unsqueeze(1)
        best, least = torch.where(loss < least, tried, best), torch.minimum(loss, least)
    return best
