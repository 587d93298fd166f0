"""What a fact about a runtime is: it finds the modules that violate it, and options that mend them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmcompress.formats.base import Entry
from llmcompress.formats.entry_checks import experts_of, named

Changes = Mapping[str, Mapping[str, Any]]
"""By module, the options that the module should have instead; {"skip": True} leaves the module unquantised."""

SKIP: Mapping[str, Any] = {"skip": True}
SKIP_BY_HAND = "skip by hand: --set 'PATTERN: {skip: true}'"


@dataclass(frozen=True)
class DeviceLinear:
    """One linear as one device runs it: several matrices where the runtime fuses them.

    rows: number of outputs on the device, of each matrix, or of each part of a matrix that joins several. inputs:
    number of inputs on the device.
    """

    entries: tuple[Entry, ...]
    rows: tuple[int, ...]
    inputs: int

    @property
    def expert(self) -> bool:
        return experts_of(self.entries[0].module) is not None


@dataclass(frozen=True)
class LoadCase:
    """A checkpoint as a runtime loads it. entries: all tensors. shards: quantised linears as one device runs them.

    model_type: what config.json says. head_width: numbers of a key or value of one head, 0 where config.json does not
    say. gpu: compute capability; None where it is not known.
    """

    entries: Sequence[Entry]
    shards: Sequence[DeviceLinear]
    model_type: str = ""
    head_width: int = 0
    gpu: tuple[int, int] | None = None


@dataclass(frozen=True)
class Violation:
    """Why a runtime does not load a checkpoint. what: the fact, and the value that violates it. modules: their names.

    by_hand: what a user may do. changes: options that mend the violation, empty where no option does. mending: the
    changes in words.
    """

    what: str
    modules: tuple[str, ...] = ()
    by_hand: str = ""
    changes: Changes = field(default_factory=dict)
    mending: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({named(self.modules)})" if self.modules else self.what


@dataclass(frozen=True, kw_only=True)
class Fact(ABC):
    """One thing a runtime's loader or kernels ask for. why: the fact as a sentence about the runtime ("it ...")."""

    why: str

    @abstractmethod
    def violations(self, case: LoadCase) -> list[Violation]:
        """What the runtime does not accept of a checkpoint."""

    def remarks(self, case: LoadCase) -> list[str]:
        """What the runtime does with a checkpoint that it accepts, and a user might not expect on this GPU."""
        return []
