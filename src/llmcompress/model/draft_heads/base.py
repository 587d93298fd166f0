"""What a kind of draft heads is: sizes, files, a forward, weights to begin with; one module of this package each."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import TensorSpec

HEAD_WEIGHT = "lm_head.weight"
CALM = 0.4
"""Of the logits that a head begins with: what is first predicted is another token's, and had better be unsure."""

Read = Callable[[str], Tensor]


class HeadTarget(NamedTuple):
    """A model that heads are made for. config: that of its text in transformers. path: for errors."""

    path: Path
    config: Any
    layers: int
    hidden: int
    vocabulary: int


@dataclass
class LearntTensor:
    """A tensor of a head. learnt: its value times `unit`, which spreads over columns; float32.

    Some channels of hidden states are a thousand times as large as others. A step of Adam moves all numbers alike, so
    those that read large channels are learnt in units of these.
    """

    pace: ClassVar[float] = 1.0
    learnt: Tensor
    unit: Tensor

    @classmethod
    def of(cls, value: Tensor, unit: Tensor | None = None) -> "LearntTensor":
        unit = torch.ones(()) if unit is None else unit
        return cls(value * unit, unit)

    def value(self) -> Tensor:
        return self.learnt / self.unit


class LearntSlowly(LearntTensor):
    """Rows of which few tokens say anything, and that are good to begin with."""

    pace: ClassVar[float] = 0.2


class TargetSample(NamedTuple):
    """What a head begins with of its target; all float32.

    rows: of its head, [draft vocabulary, hidden]. states: what the draft reads of some tokens, [tokens, width]. gains:
    [hidden], of the norm before its head. slope: of its logits by what its head gives, which other factors multiply.
    """

    rows: Tensor
    states: Tensor
    gains: Tensor
    slope: float

    @property
    def sizes(self) -> Tensor:
        """The root mean square [width] of each channel of the states, as a share of that of all of the last state."""
        found = self.states.square().mean(dim=0).sqrt()
        return (found / found[-self.rows.shape[1] :].square().mean().sqrt()).clamp(min=1e-3)


class DraftHead(Protocol):
    """A head on its weights. Outputs are what `logits` takes."""

    weights: Mapping[str, Tensor]

    def unrolled(self, embedded: Tensor, states: Tensor, depths: int) -> list[Tensor]:
        """Outputs [rows, hidden] of rows as they are when so many tokens before were drafted: 0 to depths - 1.

        A row is a token: its embedding of `embedded` [rows, hidden] beside the target's `states` [rows, width] of the
        token before. Row r at depth d knows the states of rows up to r - d. Of depth d, the first d rows mean nothing.
        """
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits [rows, draft vocabulary] of outputs [rows, hidden]."""
        ...

    def drafting(self) -> "Drafting":
        """The head as it drafts one text."""
        ...


class Drafting(Protocol):
    """Reads a text token by token, each beside the target's states of the token before, and drafts on from there."""

    def read(self, embedded: Tensor, states: Tensor) -> Tensor:
        """The output [hidden] of the last of further tokens. embedded [tokens, hidden], states [tokens, width]."""
        ...

    def read_own(self, embedded: Tensor) -> Tensor:
        """The same of one token [hidden] that was drafted, until `read` is called again."""
        ...


@dataclass(frozen=True)
class DraftShape(ABC):
    """Sizes of a head. hidden: of the target as well. vocabulary: tokens it can draft, of target_vocabulary.

    states: numbers of the target's hidden states that it reads, side by side; number n enters layer n, the last one
    leaves all layers. Where there are none, it reads what the target's head reads, behind the last norm.
    """

    hidden: int
    vocabulary: int
    target_vocabulary: int
    states: tuple[int, ...]

    kind: ClassVar[str]
    ids_name: ClassVar[str]  # of the tensor that says which tokens can be drafted

    @property
    @abstractmethod
    def most(self) -> int | None:
        """The most tokens that can be drafted one upon the other; None for any number."""

    @property
    @abstractmethod
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor that is learnt, by its name."""

    @property
    @abstractmethod
    def values(self) -> int:
        """Numbers that a forward makes of each token, but for logits and what attention sees."""

    @property
    @abstractmethod
    def scores(self) -> int:
        """Numbers that a forward makes of each pair of tokens."""

    @property
    @abstractmethod
    def id_specs(self) -> list[TensorSpec]:
        """The tensors that say which tokens can be drafted."""

    @abstractmethod
    def id_tensors(self, ids: Tensor) -> dict[str, Tensor]:
        """The same, by name, from the target's ids [draft vocabulary] int64 in rising order."""

    @abstractmethod
    def ids(self, read: Read) -> Tensor:
        """The target's ids [draft vocabulary] int64 from the tensors of a file."""

    @abstractmethod
    def config(self, dtype: str, tokens: int, target: str, architectures: Sequence[str]) -> dict[str, Any]:
        """config.json. dtype: as torch names it. tokens: drafted at a time. target: its name."""

    @abstractmethod
    def head(self, weights: Mapping[str, Tensor]) -> DraftHead:
        """The head on weights by the names in `matrices`, of any one type."""

    def specs(self, dtype: str) -> list[TensorSpec]:
        """All tensors of the file, what is learnt in `dtype`."""
        return [*(TensorSpec(name, dtype, shape) for name, shape in self.matrices.items()), *self.id_specs]


class HeadKind(Protocol):
    """A kind of heads. depths: tokens that are drafted one upon the other in training. title, tags: of a model card.

    readers: the engines that read such heads.
    """

    name: ClassVar[str]
    depths: ClassVar[int]
    title: ClassVar[str]
    tags: ClassVar[tuple[str, ...]]
    readers: ClassVar[str]

    def shape(self, target: HeadTarget, vocabulary: int) -> DraftShape:
        """The sizes of a head for a target that drafts at most so many tokens; PlanError where there can be none."""
        ...

    def start(self, shape: Any, target: TargetSample, seed: int) -> dict[str, LearntTensor]:
        """The tensors of a head that nothing has trained, by name."""
        ...

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json is of such a head."""
        ...

    def read(self, file: Path, config: Mapping[str, Any]) -> DraftShape:
        """The sizes that a config.json says; CheckpointError for a head that computes anything else than ours."""
        ...


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def refuse_no_sizes(file: Path, sizes: Mapping[str, Any], numbers: Mapping[str, Any] = MappingProxyType({})) -> None:
    """CheckpointError unless the sizes that a config.json says are positive and whole, and the numbers positive."""
    for key, value in {**sizes, **numbers}.items():
        known = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30
        if not known or not (key in numbers or is_count(value)):
            raise CheckpointError(f"{file} does not say the sizes of the head: {key} is {value!r}")


def refuse_others(file: Path, said: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """CheckpointError for a key that is there with another value than the known one."""
    for key, value in known.items():
        if said.get(key, value) != value:
            raise CheckpointError(f"{file}: {key} {said[key]!r} is not known here", f"{value!r} is")
