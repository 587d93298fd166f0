"""Plots as shapes and words on a plane, which a template writes as SVG; text and grid follow the page's theme."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, log10

from llmcompress.report.words import tick

WIDTH = 420  # units across, near the pixels of a phone, so that text of 12 units can be read there
CHARACTER = 6.3  # units across of a character, on average

SYMBOLS = (
    "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z",
    "M0-6 6 0 0 6-6 0z",
    "M-4.5-4.5h9v9h-9z",
    "M0-5.5 6 5h-12z",
    "M-2-6h4v4h4v4h-4v4h-4v-4h-4v-4h4z",
    "M0 5.5-6-5h12z",
)
"""Outlines around the origin."""


@dataclass(frozen=True)
class Shape:
    """A path. line: it is stroked, not filled. at: where its origin lies. title: what a pointer over it shows."""

    path: str
    colour: str
    title: str = ""
    line: bool = False
    at: tuple[float, float] | None = None


@dataclass(frozen=True)
class Word:
    """Text on a plot. anchor: start, middle or end. turned: it runs upwards. axis: of which it names a place."""

    x: float
    y: float
    text: str
    anchor: str = "middle"
    turned: bool = False
    axis: str = ""


@dataclass(frozen=True)
class Plot:
    """height: in units, as WIDTH. grid: paths of thin lines. legend: name, colour and outline of what is not named in
    the plot itself."""

    height: float
    shapes: Sequence[Shape]
    words: Sequence[Word]
    grid: Sequence[str] = ()
    legend: Sequence[tuple[str, str, str]] = ()

    @property
    def width(self) -> int:
        return WIDTH


@dataclass(frozen=True)
class Axis:
    """Values from low to high at places from begin to end. logarithmic: equal ratios are equally far apart.

    most: places that are named.
    """

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False
    most: int = 6

    def at(self, value: float) -> float:
        low, high, value = (self._scaled(number) for number in (self.low, self.high, value))
        return round(self.begin + (value - low) / (high - low) * (self.end - self.begin), 1)

    def value(self, share: float) -> float:
        """The value after a share of the way."""
        if self.logarithmic:
            return float(self.low * (self.high / self.low) ** share)
        return self.low + share * (self.high - self.low)

    def _scaled(self, value: float) -> float:
        return log10(value) if self.logarithmic else value

    @cached_property
    def ticks(self) -> list[float]:
        """Round values in the range, a few."""
        if self.logarithmic:
            powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            for digits in ((1, 2, 5), (1, 3), (1,)):
                found = [digit * 10.0**power for power in powers for digit in digits]
                found = [value for value in found if self.low <= value <= self.high]
                if len(found) <= self.most:
                    break
            if len(found) > 1:
                return found[:: -(-len(found) // self.most)]
        rough = (self.high - self.low) / (self.most - 1)
        power = 10.0 ** floor(log10(rough))
        step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * (1 - 1e-9))
        first, last = ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


@dataclass(frozen=True)
class Frame:
    """Where data lies on a plot, with its axes; y runs downwards on the plane."""

    x: Axis
    y: Axis

    @property
    def grid(self) -> list[str]:
        return [f"M{self.x.begin} {self.y.at(value)}H{self.x.end}" for value in self.y.ticks]

    def words(self, x: str, y: str, places: Sequence[float] | None = None) -> list[Word]:
        """The names of both axes and of places on them. places: those of x, where it has others than its own."""
        below = self.y.begin
        values = self.x.ticks if places is None else places
        found = [Word(self.x.at(value), below + 16, tick(value), axis="x") for value in values]
        found += [Word(self.x.begin - 6, self.y.at(value) + 4, tick(value), "end", axis="y") for value in self.y.ticks]
        found.append(Word((self.x.begin + self.x.end) / 2, below + 34, x))
        return [*found, Word(12, (self.y.begin + self.y.end) / 2, y, turned=True)] if y else found


def shortened(text: str, units: float) -> str:
    """Text that fits into so many units, without its beginning where it is longer."""
    most = max(int(units / CHARACTER), 4)
    return text if len(text) <= most else f"…{text[1 - most :]}"


def rectangle(x: float, y: float, width: float, height: float) -> str:
    """The path of a rectangle."""
    return f"M{x:.5g} {y:.5g}h{width:.5g}v{height:.5g}h{-width:.5g}z"
