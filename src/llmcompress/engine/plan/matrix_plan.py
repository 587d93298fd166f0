"""The plan of one matrix: the steps that change it, and the statistics of its inputs that these steps need."""

from collections.abc import Iterable
from dataclasses import dataclass

from llmcompress.formats.base import Entry
from llmcompress.formats.gguf.tensors import Factors
from llmcompress.grids.base import Spec
from llmcompress.methods.base import Method
from llmcompress.pruners.base import Pruner
from llmcompress.recipe import Recipe


@dataclass(frozen=True)
class MatrixPlan:
    """One matrix to be changed. path: module path below the layer. module: on-disk name. space: the input it reads.

    pruner: chooses the weights that become zero, before `method` rounds the other weights; None where nothing prunes.
    factors: what the file has the rows of the matrix multiplied by: the steps work on the product. inside: it lies in a
    layer that text runs through; others, such as the head, are solved after all layers.
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
    factors: Factors = ()
    inside: bool = True

    @property
    def steps(self) -> tuple[Method | Pruner, ...]:
        return (self.method,) if self.pruner is None else (self.pruner, self.method)

    @property
    def grid(self) -> Spec:
        """The grid of the stored values; of values that nothing rounds, their floating-point type."""
        return self.method.grid

    @property
    def needs(self) -> frozenset[str]:
        """Names of the statistics of the inputs (stats/) that the steps need; an expert needs no squares alone.

        The statistics of an expert that few tokens reach are completed by those of the whole layer: Gram matrices.
        """
        needs = frozenset[str]().union(*(step.needs for step in self.steps))
        return needs | {"gram"} if "squares" in needs and self.expert is not None else needs

    @property
    def needs_gram(self) -> bool:
        """Whether the Gram matrix of its inputs is needed."""
        return "gram" in self.needs

    @property
    def solved_alone(self) -> bool:
        """Whether nothing is gained by solving it with those that read the same input: they share no statistics.

        Or they must not be solved as one: its rows share what their scales are made of, or the zeros they get, and
        other matrices do not.
        """
        shared = self.method.joins_rows or (self.pruner is not None and self.pruner.within is not None)
        return (not self.needs or shared) and not self.grid.joins_matrices

    @property
    def tied(self) -> bool:
        """Whether it is the head and the embedding as well."""
        return self.entry.embedding and self.needs_gram

    @property
    def needs_calibration(self) -> bool:
        """Whether a step needs text to be run through the model."""
        return any(step.needs_calibration for step in self.steps)

    @property
    def inverts(self) -> bool:
        """Whether a step inverts the Gram matrix of the inputs."""
        return any(step.inverts for step in self.steps)

    @property
    def original_samples(self) -> int:
        """Number of windows whose inputs in the uncompressed model a step needs."""
        return max(step.original_samples for step in self.steps)

    @property
    def follows_gradients(self) -> bool:
        """Whether a pass of gradients says what its errors do to the prediction."""
        return self.needs_gram and self.method.follows_gradients

    @property
    def recovers(self) -> bool:
        """Whether its scales are fitted to what leaves its layer."""
        return self.inside and self.method.recovers

    @property
    def settings(self) -> str:
        """The options of the steps as text; matrices that share an input and these settings are solved together."""
        return "\n".join(step.model_dump_json() for step in self.steps)


def followed(recipe: Recipe, layer: Iterable[MatrixPlan]) -> list[MatrixPlan]:
    """The matrices of a layer whose errors are made up for in later outputs, by gradients at these.

    The gradients are of outputs as the source has them: neither of experts' nor of those that a transform or a factor
    scales. Weights that go while others are rounded are chosen, and outliers fitted, whatever errors do.
    """
    return [
        matrix
        for matrix in layer
        if matrix.follows_gradients
        and matrix.inside
        and matrix.expert is None
        and not matrix.method.needs_peaks
        and (matrix.pruner is None or matrix.pruner.within is None)
        and not (recipe.transforms or matrix.factors)
    ]


def runs_text(recipe: Recipe, matrices: Iterable[MatrixPlan]) -> bool:
    """Whether windows of text run through the model, for transforms or for any of the matrices."""
    return recipe.needs_calibration or any(matrix.needs_calibration for matrix in matrices)
