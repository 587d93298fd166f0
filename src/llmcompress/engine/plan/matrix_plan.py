"""What becomes of one matrix: its steps, and what they want to know of its inputs."""

from dataclasses import dataclass

from llmcompress.formats.base import Entry
from llmcompress.grids.base import Spec
from llmcompress.methods.base import Method
from llmcompress.pruners.base import Pruner


@dataclass(frozen=True)
class MatrixPlan:
    """One matrix to be changed. path: module path below the layer; module: on-disk name; space: what it reads.

    pruner: what chooses the weights that become zero, if anything does, before `method` rounds the others.
    """

    layer: int
    expert: int | None
    path: str
    module: str
    space: str
    conv1d: bool
    entry: Entry
    method: Method
    pruner: Pruner | None = None

    @property
    def steps(self) -> tuple[Method | Pruner, ...]:
        return (self.method,) if self.pruner is None else (self.pruner, self.method)

    @property
    def grid(self) -> Spec:
        """What its values are stored as, where they are not rounded as well."""
        return self.method.grid

    @property
    def needs(self) -> frozenset[str]:
        """Names of the statistics of its inputs (stats/) that its steps go by; for experts no squares without a Gram.

        An expert that few tokens come to goes by statistics of the whole layer too, which are Gram matrices.
        """
        needs = frozenset[str]().union(*(step.needs for step in self.steps))
        return needs | {"gram"} if "squares" in needs and self.expert is not None else needs

    @property
    def needs_gram(self) -> bool:
        """Whether the Gram matrix of its inputs is needed."""
        return "gram" in self.needs

    @property
    def needs_calibration(self) -> bool:
        """Whether text is run through the model for it."""
        return any(step.needs_calibration for step in self.steps)

    @property
    def inverts(self) -> bool:
        """Whether the Gram matrix of its inputs is inverted."""
        return any(step.inverts for step in self.steps)

    @property
    def original_samples(self) -> int:
        """Windows on which its inputs in the uncompressed model are wanted."""
        return max(step.original_samples for step in self.steps)

    @property
    def settings(self) -> str:
        """Options of its steps; matrices that share input and settings are solved as one."""
        return "\n".join(step.model_dump_json() for step in self.steps)
