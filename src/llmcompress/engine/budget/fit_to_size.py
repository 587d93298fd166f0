"""Choosing within a budget whose exact use only a plan tells."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from llmcompress.errors import PlanError

T = TypeVar("T")


@dataclass(frozen=True)
class Budget:
    """What a result may take: bytes of all its weight files, or bits per weight. One of them is None at least."""

    nbytes: int | None = None
    bits: float | None = None

    @property
    def asked(self) -> str:
        """The option that says so."""
        return f"--size {self.nbytes / 1e9:g}" if self.nbytes is not None else f"--bpw {self.bits:g}"


def allotted(attempt: Callable[[float], T], room: float, least: float, excess: Callable[[T], float]) -> T:
    """The first attempt that exceeds nothing. attempt: made of options that cost at most so much together.

    room: what they may cost if what comes with them, such as headers, stays as it is with the cheapest ones, which cost
    `least` and exceed nothing.
    """
    while True:
        made = attempt(room)
        over = excess(made)
        if over <= 0:
            return made
        room = max(least, room - over)


def impossible(budget: Budget, what: str, nbytes: int, bits: float) -> PlanError:
    """That nothing so small can be made. what: the options, of which the smallest make `nbytes`, `bits` per weight."""
    # rounded up, so that what is named is possible
    return PlanError(
        f"{budget.asked} is not possible: the smallest {what} make {nbytes:,} bytes, {_up(bits, 4)} bits per weight",
        f"ask for --size {_up(nbytes / 1e9, 6)} or --bpw {_up(bits, 4)} at least",
    )


def _up(value: float, digits: int) -> str:
    """A number rounded up to so many digits."""
    return f"{-(-value * 10**digits // 1) / 10**digits:.{digits}f}"
