"""Matrices as cells of layers x linears: one value each of every metric; experts of a layer share a cell."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from llmcompress.engine.write.report_schema import Linear
from llmcompress.errors import CheckpointError
from llmcompress.grids.grid_type import spec_named

_PLACE = re.compile(r"(?:^|.*?\.)(\d+)\.(.+)")
_EXPERT = re.compile(r"(^|\.)experts\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Metric:
    """A figure that a page shows for every matrix. colour, logarithmic: its scale of colours; middle: the value that is
    neither good nor bad, if any."""

    key: str
    title: str
    about: str
    value: Callable[[Linear], float | None]
    colour: str = "error"
    logarithmic: bool = False
    middle: float | None = None


def _bits(linear: Linear) -> float | None:
    """Bits per weight of a matrix; None if the matrix's grid declares none."""
    if linear.grid is None:
        return None
    try:
        return spec_named(linear.grid).bits_per_weight(linear.shape[1])
    except ValueError:
        raise CheckpointError(f"the report speaks of {linear.name} with an unknown grid {linear.grid!r}") from None


METRICS = (
    Metric(
        "rtn_ratio",
        "Error against plain rounding",
        "Loss as a share of what rounding to nearest on the same grid, ranges covering every weight, would lose. "
        "Below 1 is better; a method that makes up for the errors of earlier matrices may exceed it.",
        lambda linear: linear.rtn_ratio,
        logarithmic=True,
        middle=1.0,
    ),
    Metric(
        "loss",
        "Error of outputs",
        "Squared error of each matrix's output on the calibration text, as a share of the output's energy.",
        lambda linear: linear.loss,
        logarithmic=True,
    ),
    Metric(
        "relative_error",
        "Error of weights",
        "Relative error of the weights themselves, in the Frobenius norm.",
        lambda linear: linear.relative_error,
    ),
    Metric("bits", "Bits per weight", "Scales and zero points included.", _bits, "bits"),
    Metric("sparsity", "Zeros", "Share of weights that are exactly zero.", lambda linear: linear.sparsity, "zeros"),
)


@dataclass(frozen=True)
class Cells:
    """The matrices of a model by (layer, linear), in order of execution."""

    matrices: Mapping[tuple[int, str], Sequence[Linear]]

    @cached_property
    def layers(self) -> list[int]:
        return sorted({layer for layer, _ in self.matrices})

    @cached_property
    def linears(self) -> list[str]:
        return list(dict.fromkeys(linear for _, linear in self.matrices))

    def value(self, metric: Metric, layer: int, linear: str) -> float | None:
        """The mean of a metric over the matrices of a cell; None if no matrix has a value."""
        values = [metric.value(found) for found in self.matrices.get((layer, linear), ())]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    def rows(self, metric: Metric) -> list[list[float | None]]:
        """Values [linears, layers]."""
        return [[self.value(metric, layer, linear) for layer in self.layers] for linear in self.linears]

    def knows(self, metric: Metric) -> bool:
        return any(value is not None for row in self.rows(metric) for value in row)

    def count(self, layer: int, linear: str) -> int:
        """How many matrices share a cell."""
        return len(self.matrices.get((layer, linear), ()))


def cells_of(linears: Sequence[Linear]) -> Cells:
    """Cells of a report's matrices; the first number in a name is its layer."""
    found: dict[tuple[int, str], list[Linear]] = {}
    for linear in linears:
        place = _PLACE.fullmatch(linear.name)
        layer, below = (int(place[1]), place[2]) if place else (0, linear.name)
        found.setdefault((layer, _EXPERT.sub(r"\1experts.*", below)), []).append(linear)
    return Cells(found)
