"""The memory of commands that run text through a model, such as depth, lora and fit: phases, from headers alone."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from llmcompress.calib.sampled import KEEP_OF_TEN, Sampled
from llmcompress.engine.plan import memory_model as memory
from llmcompress.engine.plan.memory_model import MemoryModel, Phase, Term
from llmcompress.engine.plan.resources import ITEM_BYTES, Resources
from llmcompress.engine.source.header_checks import cached_width, hidden_width, likely_vocabulary
from llmcompress.engine.source.tensor_names import MatrixRef
from llmcompress.model.draft_heads.base import DraftShape
from llmcompress.store.headers import ModelHeaders


class Matrix(NamedTuple):
    """A matrix [rows, columns] that reads a space; of an expert or not."""

    space: str
    rows: int
    columns: int
    expert: bool


Layer = Sequence[Matrix]


class ModelSizes(NamedTuple):
    """Of a model whose layers have matrices, and of windows of `length` tokens. largest: tensor, elements and bytes.

    cached: numbers that a layer keeps of a token for those that follow.
    """

    layers: Sequence[Layer]
    hidden: int
    vocabulary: int
    largest: tuple[int, int]
    length: int
    cached: int = 0

    @classmethod
    def of(cls, headers: ModelHeaders, refs: Iterable[MatrixRef], length: int) -> "ModelSizes":
        """By headers that were checked."""
        layers: dict[int, list[Matrix]] = {}
        for ref in refs:
            shape = headers.tensors[f"{ref.module}.weight"].spec.shape
            rows, columns = shape[::-1] if ref.linear.conv1d else shape
            layers.setdefault(ref.layer, []).append(Matrix(ref.space, rows, columns, ref.expert is not None))
        spec = max((stored.spec for stored in headers.tensors.values()), key=lambda spec: spec.nbytes)
        largest, vocabulary = (prod(spec.shape), spec.nbytes), likely_vocabulary(headers)
        return cls(list(layers.values()), hidden_width(headers), vocabulary, largest, length, cached_width(headers))

    def head(self, dtype: str) -> Term:
        """The head as it is read and then in the type of the layers."""
        elements, nbytes = self.largest
        wide = elements * ITEM_BYTES[dtype]
        return Term("head", nbytes if wide <= nbytes else wide + nbytes)

    def entering(self, resources: Resources) -> Phase:
        """A batch is embedded; of the embedding only the rows of its tokens are read."""
        return Phase("entering", [memory.entering(resources.batch * self.length, self.hidden, resources.item_bytes)])

    @property
    def writing(self) -> Phase:
        return Phase("writing", [Term("largest tensor", int(memory.COPIED * self.largest[1]))])

    def running(self, layer: Layer, resources: Resources) -> list[Term]:
        """The layer, and batches in it."""
        widest, tokens = max(max(matrix.rows, matrix.columns) for matrix in layer), resources.batch * self.length
        batches = memory.running(tokens, resources.threads, widest, self.hidden, resources.item_bytes)
        return [_loaded(layer, resources), batches]


def depth_memory(sizes: ModelSizes, resources: Resources, compared: bool | None, decoded: bool = False) -> MemoryModel:
    """Of dropping layers. compared: whether by the divergence of logits, None where no text runs. decoded: whether
    matrices are codes."""
    phases = [sizes.writing]
    if compared is not None:
        phases.append(sizes.entering(resources))
        phases += [Phase("running", sizes.running(layer, resources)) for layer in sizes.layers]
    if decoded:
        for layer in sizes.layers:
            loaded = [] if compared is None else [_loaded(layer, resources)]
            phases.append(Phase("reading", [*loaded, _decoding(layer)]))
    if compared:
        logits = Term("logits", memory.LOGIT_DIVERGENCE * memory.HEAD_TOKENS * sizes.vocabulary)
        phases.append(Phase("head", [sizes.head(resources.dtype), logits]))
    return MemoryModel(memory.process(resources.threads, 0), phases)


def width_memory(sizes: ModelSizes, resources: Resources, inner: int, width: int, inverse: bool) -> MemoryModel:
    """Of leaving `width` of `inner` channels. inverse: whether those go that the others make up for best."""
    out, gram = sizes.hidden, Term("Gram matrix", 4 * inner**2)
    solving = {
        "choosing": 28 * inner**2 if inverse else 4 * out * inner,
        "refitting": 4 * inner * width + 20 * width**2 + 16 * out * width,
        "measuring the loss": 12 * out * inner,
    }
    phases = [sizes.entering(resources), sizes.writing]
    for layer in sizes.layers:
        begun = [_loaded(layer, resources), gram, Term("matrix, twice", 8 * out * inner)]
        phases.append(Phase("running", [gram, *sizes.running(layer, resources)]))
        phases += [Phase(name, [*begun, Term("at work", nbytes)]) for name, nbytes in solving.items()]
    return MemoryModel(memory.process(resources.threads, memory.FLOAT32_ALGEBRA), phases)


def lora_memory(sizes: ModelSizes, resources: Resources, by_outputs: bool) -> MemoryModel:
    """Of adapters. by_outputs: whether errors are those of outputs on text."""
    phases = [sizes.entering(resources)] if by_outputs else []
    for layer in sizes.layers:
        for space in dict.fromkeys(matrix.space for matrix in layer if not matrix.expert):
            stage = [matrix for matrix in layer if matrix.space == space]
            solved = sorted(map(_solved, stage), reverse=True)[: resources.threads]
            gram = [Term("Gram matrix", 4 * stage[0].columns ** 2)] if by_outputs else []
            loaded = [_loaded(layer, resources)] if by_outputs else []
            phases.append(Phase("solving", [*loaded, *gram, Term("matrices at work", sum(solved))]))
            if by_outputs:
                phases.append(Phase("running", [*gram, *sizes.running(layer, resources)]))
    return MemoryModel(memory.process(resources.threads, memory.FLOAT32_ALGEBRA), phases)


def fit_memory(
    sizes: ModelSizes, resources: Resources, compensated: bool, sampled: int, products: Sequence[int]
) -> MemoryModel:
    """Of measuring what grids lose, a window at a time for each thread.

    compensated: whether errors are made up for. sampled: weights of a matrix that are rounded. products: bytes of the
    products of gradients at the outputs of each layer.
    """
    shares = resources.threads + 1
    logits = Term("logits", memory.LOGIT_GRADIENT * memory.HEAD_TOKENS * sizes.vocabulary * resources.threads)
    phases = [Phase("head being read", [sizes.head(resources.dtype)])]
    phases.append(Phase("head", [Term("head", resources.item_bytes * sizes.largest[0]), logits]))
    for layer, followed in zip(sizes.layers, products, strict=True):
        loaded, kept = _loaded(layer, resources), _kept(layer) if compensated else []
        # of windows that are run, and of those that wait their turn
        gradients = Term("gradients of matrices", loaded.nbytes * shares)
        values = memory.GRADIENT_VALUES * (sizes.hidden + max(matrix.rows for matrix in layer)) * sizes.length
        windows = [Term("values of windows", values * shares), Term("products of outputs", followed * (shares + 1))]
        phases.append(Phase("backward", [*kept, loaded, gradients, *windows]))
        if compensated:
            phases.append(Phase("rounding", [*kept, *_rounding(layer, sampled * shares)]))
    factorised = max(matrix.columns for layer in sizes.layers for matrix in layer) if compensated else 0
    return MemoryModel(memory.process(resources.threads, memory.algebra(factorised)), phases)


def recover_memory(
    sizes: ModelSizes, resources: Resources, at_once: int, learnt: int, gguf: bool, writer: ModelSizes, written: int
) -> MemoryModel:
    """Of training a compressed model. at_once: windows of a step. learnt: numbers that are learnt of weights.

    gguf: whether the model is a GGUF file. writer: the original, which writes so many windows, all of it in memory.
    """
    item, threads = resources.item_bytes, resources.threads
    shares, weights = threads + 1, sum(matrix.rows * matrix.columns for layer in sizes.layers for matrix in layer)
    kept = [
        Term("embedding and both heads", 2 * sizes.largest[0] * item),
        Term("states", (len(sizes.layers) + 2) * at_once * sizes.length * sizes.hidden * item),
        Term("factors", int(memory.TRAINED * weights)),
        Term("what is learnt of weights", memory.LEARNT * learnt),
        Term("vocabulary", memory.WITH_GGUF * gguf),
    ]
    logits = Term("logits", memory.LOGIT_GRADIENT * memory.HEAD_TOKENS * sizes.vocabulary * threads)
    phases = [sizes.entering(resources), sizes.writing, Phase("head", [*kept, logits])]
    phases += [Phase("original", sizes.running(layer, resources)) for layer in sizes.layers]
    for layer in sizes.layers:
        loaded, widest = _loaded(layer, resources), max(matrix.rows for matrix in layer)
        largest = max(matrix.rows * matrix.columns for matrix in layer)
        gradients = Term("gradients of matrices", (loaded.nbytes + 8 * largest) * threads)
        values = memory.GRADIENT_VALUES * (sizes.hidden + widest) * sizes.length
        phases.append(Phase("reading", [*kept, loaded, _decoding(layer)]))
        phases.append(Phase("backward", [*kept, loaded, gradients, Term("values of windows", values * shares)]))
    if written:
        phases.append(_writing_text(writer, resources, written))
    return MemoryModel(memory.process(threads, 0), phases)


def draft_memory(
    sizes: ModelSizes, resources: Resources, head: DraftShape, learnt: int, depths: int, written: int
) -> MemoryModel:
    """Of training a draft head of `learnt` numbers at so many depths.

    written: windows that the model writes, all of it in memory.
    """
    item, threads, width = resources.item_bytes, resources.threads, memory.GRADIENT_VALUES
    held = [
        _embedding_and_head(sizes, resources),
        # the tensors, Adam's two of each, the best and the sum of gradients; and as they are used
        Term("head of the draft", learnt * (5 * 4 + item)),
    ]
    chances = depths * memory.DRAFT_LOGITS * head.vocabulary
    scores = depths * memory.DRAFT_SCORES * head.scores * sizes.length
    values = Term("values of windows", (chances + scores + width * head.values) * sizes.length * threads)
    gradients = Term("gradients", learnt * (4 + item) * (threads + 1))
    logits = Term("logits", memory.LOGIT_DIVERGENCE * memory.HEAD_TOKENS * sizes.vocabulary * threads)
    phases = [sizes.entering(resources), Phase("training", [*held, values, gradients, logits])]
    phases += [Phase("target", sizes.running(layer, resources)) for layer in sizes.layers]
    if written:
        phases.append(_writing_text(sizes, resources, written))
    return MemoryModel(memory.process(threads, 0), phases)


def _embedding_and_head(sizes: ModelSizes, resources: Resources) -> Term:
    return Term("embedding and head", 2 * sizes.largest[0] * resources.item_bytes)


def _writing_text(sizes: ModelSizes, resources: Resources, windows: int) -> Phase:
    """A model writes windows, some at once, all of it in memory with the keys and values of these."""
    weights = sum(_loaded(layer, resources).nbytes for layer in sizes.layers)
    rows = min(Sampled().batch_size, -(-windows * 10 // KEEP_OF_TEN))
    kept = rows * sizes.length * len(sizes.layers) * sizes.cached * resources.item_bytes
    return Phase(
        "writing text",
        [
            _embedding_and_head(sizes, resources),
            Term("layers", weights),
            Term("keys and values", kept),
            Term("chances", memory.WRITTEN_CHANCES * rows * sizes.vocabulary),
        ],
    )


def _decoding(layer: Layer) -> Term:
    """The largest matrix of a layer as it is decoded."""
    return Term("matrix being decoded", memory.BEING_DECODED * max(matrix.rows * matrix.columns for matrix in layer))


def _loaded(layer: Layer, resources: Resources) -> Term:
    return Term("layer", sum(matrix.rows * matrix.columns for matrix in layer) * resources.item_bytes)


def _solved(matrix: Matrix) -> int:
    """Of one matrix: both versions, their difference, its frame, and the eigenvectors of what it does to outputs."""
    return 20 * matrix.rows * matrix.columns + 24 * min(matrix.rows, matrix.columns) ** 2


def _input(matrix: Matrix) -> str:
    """What a matrix reads; experts of a layer read one input."""
    return matrix.space.rpartition(".")[0] if matrix.expert else matrix.space


def _kept(layer: Layer) -> list[Term]:
    """Of each input a square matrix [columns, columns] of float32, and two of each matrix, or kind of expert's."""
    inputs = {_input(matrix): matrix.columns for matrix in layer}
    kinds = {(_input(matrix) if matrix.expert else number, matrix.rows): matrix.columns
             for number, matrix in enumerate(layer)}  # fmt: skip
    squares = [sum(columns**2 for columns in widths.values()) for widths in (inputs, kinds)]
    return [Term("statistics of inputs", 4 * squares[0]), Term("statistics of matrices", 8 * squares[1])]


def _rounding(layer: Layer, sampled: int) -> list[Term]:
    """Square matrices of the widest input, those of each matrix that reads one, and the rows that are rounded."""
    widest = max(matrix.columns for matrix in layer)
    readers = max(sum(other.space == matrix.space for other in layer) for matrix in layer)
    return [Term("square matrices", (36 + 4 * readers) * widest**2), Term("rows", 4 * 12 * readers * sampled)]
