"""Choosing options within a size budget, where only a plan tells how much of the budget a choice uses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llmcompress.errors import PlanError
from llmcompress.solve.knapsack import Choice, cheapest, choose, mirrored

T = TypeVar("T")


@dataclass(frozen=True)
class Budget:
    """How large a result may be: bytes of all weight files, or bits per weight. At least one of the two is None."""

    nbytes: int | None = None
    bits: float | None = None

    @property
    def asked(self) -> str:
        """The command line option that sets this budget."""
        return f"--size {self.nbytes / 1e9:g}" if self.nbytes is not None else f"--bpw {self.bits:g}"


def allotted(attempt: Callable[[float], T], room: float, least: float, excess: Callable[[T], float]) -> T:
    """The first attempt that keeps within the budget; room is reduced until one does.

    attempt: makes a result of options that together cost at most the given room. excess: by how much a result exceeds
    the budget. room: what the options may cost if headers and the like stay as large as with the cheapest options,
    which cost `least` and keep within the budget.
    """
    while True:
        made = attempt(room)
        over = excess(made)
        if over <= 0:
            return made
        room = max(least, room - over)


def impossible(budget: Budget, what: str, nbytes: int, bits: float, weight: str) -> PlanError:
    """The error for a budget that is below the smallest result: `what` of it make `nbytes` and `bits` per `weight`."""
    # rounded up, so that what is named is possible
    return PlanError(
        f"{budget.asked} is not possible: the smallest {what} make {nbytes:,} bytes, {_up(bits, 4)} bits per {weight}",
        f"ask for --size {_up(nbytes / 1e9, 6)} or --bpw {_up(bits, 4)} at least",
    )


def within_divergence(choices: Sequence[Sequence[Choice]], kl: float, what: str, hint: str) -> list[int]:
    """The number of a choice for each item, such that all together lose at most `kl` and cost little.

    PlanError with `hint` where even the largest of `what` lose more.
    """
    turned = mirrored(choices)
    best = sum(options[cheapest(options)].cost for options in turned)
    if best > kl:
        raise PlanError(f"--kl {kl:g} is not possible: of the largest {what} {best:.3g} is expected", hint)
    return choose(turned, kl)


def too_little(budget: Budget, kl: float, nbytes: int, bits: float, weight: str) -> PlanError:
    """The error for a budget within which no divergence of `kl` is possible, which takes `nbytes` and `bits`."""
    return PlanError(
        f"--kl {kl:g} is not possible within {budget.asked}: it takes {nbytes:,} bytes, {bits:.4f} bits per {weight}",
        "allow more of either",
    )


def _up(value: float, digits: int) -> str:
    """A number rounded up to so many digits."""
    return f"{-(-value * 10**digits // 1) / 10**digits:.{digits}f}"
