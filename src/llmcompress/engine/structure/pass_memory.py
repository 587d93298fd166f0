"""Memory of commands that run text through a model and are no runs: depth, width, lora and fit; from headers alone.

As for runs (engine/plan/estimate.py), what is added up is the interpreter and the larger of what stands outside of the
layers and the layer that takes most.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from llmcompress.engine.plan.estimate import ALGEBRA, ITEM_BYTES, PER_THREAD, WITH_MODEL, hidden_width
from llmcompress.engine.plan.options import Resources
from llmcompress.engine.plan.resources import MARGIN
from llmcompress.engine.source.tensor_names import MatrixRef
from llmcompress.errors import PlanError
from llmcompress.store.headers import ModelHeaders

HEAD_TOKENS = 128  # of which all logits, and a few tensors as large, are in memory at once
_WINDOW = 8  # narrow and wide tensors of a layer that a window leaves for its gradient, of each kind
_LOGITS = 30  # bytes for each logit of the tokens at the head, where gradients begin
_COMPARED = 22  # the same where divergences are taken
_READ = 1.4  # bytes for each of the largest tensor's as it is copied into an output


class Matrix(NamedTuple):
    """A matrix [rows, columns] that reads a space; of an expert or not."""

    space: str
    rows: int
    columns: int
    expert: bool

    @property
    def weights(self) -> int:
        return self.rows * self.columns


class Sizes(NamedTuple):
    """Of a model and the windows that run through it. layers: their matrices. largest: elements and bytes of a tensor.

    table: elements of the largest tensor outside of the layers.
    """

    layers: Sequence[Sequence[Matrix]]
    hidden: int
    vocabulary: int
    largest: tuple[int, int]
    length: int

    @classmethod
    def of(cls, headers: ModelHeaders, refs: Iterable[MatrixRef], length: int) -> "Sizes":
        """By headers that were checked."""
        layers: dict[int, list[Matrix]] = {}
        for ref in refs:
            shape = headers.tensors[f"{ref.module}.weight"].spec.shape
            rows, columns = shape[::-1] if ref.linear.conv1d else shape
            layers.setdefault(ref.layer, []).append(Matrix(ref.space, rows, columns, ref.expert is not None))
        spec = max((stored.spec for stored in headers.tensors.values()), key=lambda spec: spec.nbytes)
        vocabulary = headers.config.get("vocab_size")
        hidden = hidden_width(headers)
        count = vocabulary if isinstance(vocabulary, int) else spec.shape[0]
        return cls(list(layers.values()), hidden, count, (prod(spec.shape), spec.nbytes), length)

    def table(self, dtype: str) -> int:
        """Bytes of the embedding, or of the head, as it is read and then in the type of the layers."""
        elements, nbytes = self.largest
        wide = elements * ITEM_BYTES[dtype]
        return nbytes if wide <= nbytes else wide + nbytes


def bounded(
    resources: Resources, limit: int | None, memory: Callable[[Resources], int], free: tuple[bool, bool]
) -> Resources:
    """Resources whose memory keeps within a limit: fewer threads and smaller batches, where these are `free` to choose.

    PlanError where even the fewest take more.
    """
    threads, batches = free
    while limit is not None and memory(resources) * MARGIN > limit:
        if resources.threads > 1 and threads:
            resources = replace(resources, threads=resources.threads - 1)
        elif resources.batch > 1 and batches:
            resources = replace(resources, batch=resources.batch // 2)
        else:
            raise PlanError(
                f"up to {memory(resources) * MARGIN / 1e9:.2f} GB of memory are needed, "
                f"--max-memory allows {limit / 1e9:.2f}",
                "use a shorter --length, or allow more",
            )
    return resources


def depth_memory(sizes: Sizes, resources: Resources, compared: bool) -> int:
    """Of dropping layers. compared: whether by the divergence of logits."""
    head = sizes.table(resources.dtype) + _COMPARED * HEAD_TOKENS * sizes.vocabulary if compared else 0
    layers = max(_loaded(layer, resources) + _running(layer, sizes, resources) for layer in sizes.layers)
    return _begun(resources) + max(_outside(sizes, resources), head, layers, int(_READ * sizes.largest[1]))


def width_memory(sizes: Sizes, resources: Resources, inner: int, width: int, inverse: bool) -> int:
    """Of leaving `width` of `inner` channels. inverse: whether those go that the others make up for best."""
    out = sizes.hidden
    chosen = 28 * inner**2 if inverse else 4 * out * inner
    fitted = 4 * inner * width + 20 * width**2 + 16 * out * width
    solved = 4 * inner**2 + 8 * out * inner + max(chosen, fitted, 12 * out * inner)
    most = max(_loaded(layer, resources) + max(4 * inner**2 + _running(layer, sizes, resources), solved)
               for layer in sizes.layers)  # fmt: skip
    return _begun(resources) + ALGEBRA + max(_outside(sizes, resources), most, int(_READ * sizes.largest[1]))


def lora_memory(sizes: Sizes, resources: Resources, by_outputs: bool) -> int:
    """Of adapters. by_outputs: whether errors are those of outputs on text."""
    most = 0
    for layer in sizes.layers:
        spaces: dict[str, list[Matrix]] = {}
        for matrix in layer:
            if not matrix.expert:
                spaces.setdefault(matrix.space, []).append(matrix)
        for group in spaces.values():
            solved = sum(sorted((_solved(matrix) for matrix in group), reverse=True)[: resources.threads])
            if by_outputs:
                gram = 4 * group[0].columns ** 2
                solved = _loaded(layer, resources) + gram + max(solved, _running(layer, sizes, resources))
            most = max(most, solved)
    outside = _outside(sizes, resources) if by_outputs else 0
    return _begun(resources) + ALGEBRA + max(outside, most)


def fit_memory(sizes: Sizes, resources: Resources, compensated: bool, sampled: int) -> int:
    """Of measuring what grids lose. Layers run in float32, a window at a time for each thread.

    compensated: whether errors are made up for. sampled: weights of a matrix that are rounded.
    """
    resources = replace(resources, dtype="float32", batch=1)
    logits = 4 * sizes.largest[0] + _LOGITS * HEAD_TOKENS * sizes.vocabulary
    most = 0
    for layer in sizes.layers:
        spaces = {matrix.space: matrix.columns for matrix in layer if not matrix.expert}
        spaces |= {matrix.space.rpartition(".")[0]: matrix.columns for matrix in layer if matrix.expert}
        weights = sum(matrix.weights for matrix in layer)
        kinds = {(matrix.space.rpartition(".")[0] if matrix.expert else index, matrix.rows): matrix
                 for index, matrix in enumerate(layer)}.values()  # fmt: skip
        kept = 4 * (sum(c**2 for c in spaces.values()) + 2 * sum(m.columns**2 for m in kinds)) if compensated else 0
        # gradients of the matrices: of windows that are run, and of those that wait their turn
        parts = 4 * weights * (resources.threads + 1)
        through = (resources.threads + 1) * sizes.length * 4 * _WINDOW * (sizes.hidden + max(m.rows for m in layer))
        widest = max(spaces.values())
        rounding = 0
        if compensated:
            readers = max(sum(m.space == matrix.space for m in layer) for matrix in layer)
            at_work = 4 * 12 * readers * sampled * (resources.threads + 1)
            rounding = 36 * widest**2 + 4 * readers * widest**2 + at_work
        most = max(most, kept + max(4 * weights + parts + through, rounding))
    return _begun(resources) + ALGEBRA + max(sizes.table("float32"), logits, most)


def _begun(resources: Resources) -> int:
    return WITH_MODEL + PER_THREAD * (resources.threads - 1)


def _outside(sizes: Sizes, resources: Resources) -> int:
    """The embedding, while text enters."""
    return (
        sizes.table(resources.dtype) + 4 * resources.batch * sizes.length * sizes.hidden * ITEM_BYTES[resources.dtype]
    )


def _loaded(layer: Sequence[Matrix], resources: Resources) -> int:
    return sum(matrix.weights for matrix in layer) * ITEM_BYTES[resources.dtype]


def _running(layer: Sequence[Matrix], sizes: Sizes, resources: Resources) -> int:
    """As for runs: results of all threads, and of one more batch, wait."""
    widest = max(max(matrix.rows, matrix.columns) for matrix in layer)
    tokens = resources.batch * sizes.length * (resources.threads + 1)
    return tokens * (3 * widest + 8 * sizes.hidden) * ITEM_BYTES[resources.dtype]


def _solved(matrix: Matrix) -> int:
    """Of one matrix: both versions, their difference, its frame, and the eigenvectors of what it does to outputs."""
    narrow = min(matrix.rows, matrix.columns)
    return 20 * matrix.weights + 24 * narrow**2
