"""The memory of a run, on a processor or a GPU: its phases, from headers and options alone."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

from llmcompress.engine.plan import memory_model as memory
from llmcompress.engine.plan.matrix_plan import MatrixPlan, followed, runs_text
from llmcompress.engine.plan.memory_model import Device, MemoryModel, Phase, Term
from llmcompress.engine.plan.resources import Resources
from llmcompress.engine.source.header_checks import hidden_width, likely_vocabulary
from llmcompress.engine.source.quantised import DecodedHeaders
from llmcompress.formats.gguf.file import ENCODED_AT_ONCE
from llmcompress.formats.gguf.hyper import EXPERTS_USED
from llmcompress.grids.base import PRODUCT_ROWS
from llmcompress.grids.integer import SEARCHED
from llmcompress.hardware import MORE_ON_GPU
from llmcompress.recipe import Recipe
from llmcompress.solve.damping import WHOLE
from llmcompress.solve.output_feedback import products_bytes
from llmcompress.solve.row_blocks import LOOKED_AT, SOLVED_ROWS, solved_rows
from llmcompress.stats.gram import PANELS
from llmcompress.store.folds import TURNED_ROWS
from llmcompress.store.headers import ModelHeaders
from llmcompress.transforms.base import Scaling
from llmcompress.transforms.rotate import Rotate

Layer = Sequence[MatrixPlan]

# square matrices of inputs, of float32
_FACTORISED = 4  # a Gram matrix, and what makes its factor: one of float64, and that cast; or three for shrinkage
_CORRECTED = 3  # a drift, its Gram matrix, and the factor of that
_ROUNDED = 3  # a Gram matrix, damped, that in order, and its factor


def memory_of_run(headers: ModelHeaders, recipe: Recipe, layers: Sequence[Layer], resources: Resources) -> "RunMemory":
    """The memory of a run on a processor, or on a GPU. layers: the matrices of each that are changed."""
    return (_GpuRunMemory if resources.gpu else RunMemory)(headers, recipe, layers, resources)


def output_products(recipe: Recipe, layer: Layer) -> int:
    """Bytes of the products of gradients at the outputs of a layer."""
    return sum(products_bytes(plan.entry.out_features) for plan in followed(recipe, layer))


class RunMemory:
    """The memory of a run on a processor: terms of its phases.

    calibrated: whether text runs through the layers. counted: the same, but on a GPU what transforms measure is not
    counted. paired: whether text runs through the uncompressed layers too. recovers: whether scales of layers are
    trained. largest: tensor of the model. tokens: of a batch. item: bytes of a value. decoded: weights of the largest
    matrix that the source stores as codes, or that an adapter changes.
    """

    device: Device = "host"

    def __init__(self, headers: ModelHeaders, recipe: Recipe, layers: Sequence[Layer], resources: Resources) -> None:
        self.headers, self.recipe, self.layers, self.resources = headers, recipe, layers, resources
        self.item, self.threads = resources.item_bytes, resources.threads
        self.matrices = [plan for layer in layers for plan in layer]
        measured = any(plan.needs_calibration for plan in self.matrices)
        self.calibrated = runs_text(recipe, self.matrices)
        self.counted = measured if resources.gpu else self.calibrated
        self.paired = any(plan.original_samples for plan in self.matrices)
        self.weighed = any(plan.follows_gradients for plan in self.matrices)
        self.recovers = any(plan.recovers for plan in self.matrices)
        self.largest = max((stored.spec for stored in headers.tensors.values()), key=lambda spec: spec.nbytes)
        packed = headers.packed if isinstance(headers, DecodedHeaders) else ()
        decoded = {f"{module}.weight" for module in packed} | (
            {} if headers.merged is None else headers.merged.changes
        ).keys()
        self.decoded = max((prod(headers.tensors[name].spec.shape) for name in decoded), default=0)
        self.hidden, self.tokens = hidden_width(headers), resources.batch * recipe.calibration.length
        self.gguf = recipe.output.format == "gguf"
        self.scaled = any(isinstance(step, Scaling) for step in recipe.transforms) and not resources.gpu

    def model(self) -> MemoryModel:
        """The largest tensor alone, or a layer that runs, or whose scales or codes are chosen."""
        phases = [Phase("largest tensor", list(self.table()))]
        phases += [Phase("gradients at the head", list(self.head_gradients()))] if self.weighed else []
        for layer in filter(None, self.layers):
            loaded = list(self.loaded(layer))
            phases += [Phase("decoding", [*loaded, *self.decoding()])] if self.decoded else []
            phases += [Phase("gradients", list(self.gradients(layer)))] if self.weighed else []
            phases += [Phase("running", [*loaded, *self.running(layer)])] if self.counted else []
            recovers = any(plan.recovers for plan in layer)
            phases += [Phase("recovering", [*loaded, *self.recovering(layer)])] if recovers else []
            phases += [Phase("scaling", [*loaded, *terms]) for terms in self.scaling(layer)] if self.scaled else []
            phases += [Phase("solving", [*loaded, *terms]) for terms in self.solving(layer)]
        return MemoryModel(list(self.throughout()), phases)

    def loaded(self, layer: Layer) -> Iterator[Term]:
        """A layer that runs, where one does, and what is kept of its inputs for other runs."""
        if self.counted:
            held = [plan for plan in layer if plan.expert is None] if self.resources.experts_on_demand else layer
            yield self.term("layer", self.held(held) * self.item)
        if self.resources.keeps_statistics:
            squares = {plan.space: plan.entry.in_features**2 for plan in layer if plan.needs_gram}
            yield Term("statistics to keep", 2 * sum(squares.values()))  # one triangle of each

    def held(self, layer: Layer) -> int:
        """Weights of a layer in memory: of those that change while the layer as it was still runs, twice as many.

        Nothing runs through a head.
        """
        if not all(plan.inside for plan in layer):
            return 0
        last = max((at for at, plan in enumerate(layer, 1) if plan.expert is None), default=0)
        return _weights(layer) + (_weights(layer[:last]) if self.paired else 0)

    def routed(self, layer: Layer) -> int:
        """Numbers that enter the experts of a layer for each token of the text, in their widest stage."""
        spaces = {plan.space: plan.entry.in_features for plan in layer if plan.expert is not None and plan.needs_gram}
        said = (self.headers.config.get(name) for name in EXPERTS_USED)
        used = next((count for count in said if isinstance(count, int)), len(spaces))
        return min(used, len(spaces)) * max(spaces.values(), default=0)

    def term(self, name: str, nbytes: int) -> Term:
        return Term(name, nbytes, self.device)

    def throughout(self) -> Iterator[Term]:
        yield Term("vocabulary", memory.WITH_GGUF * self.gguf)
        if self.counted:
            factorised = max((plan.entry.in_features for plan in self.matrices if plan.inverts), default=0)
            yield from memory.process(self.threads, memory.algebra(factorised))
            routed = any(map(self.routed, self.layers))
            # kept for products of 16-bit floats alone
            yield Term("products of experts", memory.EXPERT_PRODUCTS * (routed and self.item < 4))
        else:
            yield Term("interpreter", memory.WITHOUT_MODEL)

    def table(self) -> Iterator[Term]:
        """The largest tensor, mostly the embedding, while text enters or while it is written."""
        largest, kept = self.largest, 1.0 if self.counted or self.gguf else memory.COPIED
        if any(isinstance(step, Rotate) and step.residual for step in self.recipe.transforms):
            yield Term("rows being rotated", memory.ROTATED_ROWS * TURNED_ROWS * self.hidden)
            kept = memory.ROTATED
        yield Term("largest tensor", int(kept * largest.nbytes))
        if self.gguf:
            yield Term("weights being encoded", memory.ENCODED * min(prod(largest.shape), ENCODED_AT_ONCE))
        if self.counted:
            yield memory.entering(self.tokens, self.hidden, self.item)

    def running(self, layer: Layer) -> Iterator[Term]:
        """Batches, what of them enters experts, and the statistics of one stage (if paired its drift and the drift's).

        The Gram matrices of experts are not among them: each is made of inputs on disk when the expert is solved.
        """
        alone = [plan for plan in layer if plan.expert is None]
        if alone and self.routed(layer):  # no pass over its stages computes an expert
            yield memory.running_without_experts(self.tokens, self.threads, _widest(alone), self.item)
        else:
            yield self._batches(layer)
        yield Term("inputs of experts", self.tokens * (self.threads + 2) * self.routed(layer) * self.item)
        yield Term("statistics", (3 if self.paired else 1) * _largest_square(layer))
        if self.resources.experts_on_demand:
            experts = [plan for plan in layer if plan.expert is not None]
            largest = max((_weights([plan]) for plan in experts), default=0)
            yield Term("codes of experts", _code_bytes(experts))
            yield Term("matrices of experts being read", memory.READ_ON_DEMAND * self.threads * largest)

    def head_gradients(self) -> Iterator[Term]:
        """The head, and logits of some tokens, where gradients begin."""
        yield self.term("head", prod(self.largest.shape) * self.item)
        # half of what is kept for a logit is in the type of the layers
        kept = memory.LOGIT_DRAWN * (4 + self.item) // 8
        yield self.term("logits", kept * memory.HEAD_TOKENS * likely_vocabulary(self.headers) * self.threads)

    def gradients(self, layer: Layer) -> Iterator[Term]:
        """A layer, and what windows that run back through it keep: those of the threads, and one that waits."""
        yield self.term("layer", _weights(layer) * self.item)
        yield self._there_and_back(layer)
        yield Term("products of outputs", self.products(layer) * (self.threads + 2))

    def recovering(self, layer: Layer) -> Iterator[Term]:
        """Codes of a layer, and what scales are trained with: gradients and windows of the threads, Adam's numbers."""
        weights, largest = _weights(layer), max(_weights([plan]) for plan in layer)
        yield Term("codes", weights)
        yield Term("factors", int(memory.TRAINED * weights))
        # besides, each thread has decoded matrices in float32 and in 16 bits
        yield self.term("gradients of matrices", ((self.item + 6) * weights + 8 * largest) * self.threads)
        yield self._there_and_back(layer)
        # in float32: what leaves the layer, what is wanted, the error, and its gradient
        yield self.term("errors of windows", 16 * self.hidden * self.recipe.calibration.length * (self.threads + 1))

    def products(self, layer: Layer) -> int:
        """Bytes of the products of gradients at the outputs of a layer."""
        return output_products(self.recipe, layer)

    def feedback(self, layer: Layer, plan: MatrixPlan, weights: int) -> Term:
        """Those products, and the errors of the weights that are solved as one, the last of whose matrices is given."""
        errors = 4 * weights if followed(self.recipe, [plan]) else 0
        return self.term("products and errors of outputs", self.products(layer) + errors)

    def decoding(self) -> Iterator[Term]:
        """The largest matrix that the source stores as codes, as it is read."""
        yield Term("matrix being decoded", memory.BEING_DECODED * self.decoded)

    def solving(self, layer: Layer) -> Iterator[list[Term]]:
        """Each stage: its statistics, its weights, and several tensors of the rows at work; codes of those before.

        Each thread solves an expert of its own, beside what all of them borrow from.
        """
        borrowed, routed, stages = self._borrowed(layer), False, _stages(layer)
        inputs = Counter(plan.space for *_, plan in stages)
        for rows, columns, plan in stages:
            routed |= plan.expert is not None
            codes = Term("codes", _code_bytes([plan for plan in layer if routed or plan.expert is None]))
            squares = self._squares(columns, plan, again=inputs[plan.space] > 1)
            every = self.threads if plan.expert is not None and plan.needs_gram else 1
            # without an inverse, rows are rounded in pieces that fit a processor's cache
            at_once = memory.ROUNDED * min(rows, SOLVED_ROWS * self.threads // every) if plan.inverts else 0
            searched = memory.OUTPUT_SEARCH * PRODUCT_ROWS * self.threads if plan.method.clip == "output" else 0
            at_work = Term("rows at work", max(every * at_once, searched) * columns)
            weights = Term("weights", every * _solved_bytes(plan) * rows * columns)
            if not plan.entry.block:
                weights, at_work = self._head(plan, at_work)
            first, then = (Term("statistics", every * count * 4 * columns**2) for count in squares)
            feedback = self.feedback(layer, plan, rows * columns)
            yield [codes, borrowed, first, weights, feedback]
            yield [codes, borrowed, then, weights, at_work, feedback]

    def _squares(self, columns: int, plan: MatrixPlan, again: bool) -> tuple[int, int]:
        """Square matrices of a stage's inputs until there is a factor, and then.

        plan: one of its matrices. again: whether others that read these inputs are solved apart from them.
        """
        if not plan.inverts:
            return int(plan.needs_gram), int(plan.needs_gram)
        if plan.expert is not None:
            return _FACTORISED, 1 + _ROUNDED  # several threads may read one Gram matrix
        left = 2 * again if self.paired else 0  # a drift and its Gram matrix
        first = _FACTORISED + (_CORRECTED if self.paired and columns <= WHOLE else left)  # narrow ones at once
        return first, _ROUNDED + left

    def scaling(self, layer: Layer) -> Iterator[list[Term]]:
        """Statistics of all inputs at once, and either the batches, or a site's matrices at work."""
        widths = {_site(plan): plan.entry.in_features for plan in layer}
        rows = dict.fromkeys(widths, 0)
        for plan in layer:
            rows[_site(plan)] += plan.entry.out_features
        kept = sum(4 * columns**2 + 4 * memory.SCALE_TOKENS * columns for columns in widths.values())
        statistics = Term("statistics and tokens of all inputs", kept)
        seen = sum({plan.space: plan.entry.in_features for plan in layer if plan.expert is None}.values())
        inputs = Term("inputs of the batches", self.tokens * (self.threads + 1) * self.item * seen)
        yield [statistics, self._batches(layer), inputs]
        site = Term("matrices of a site", 4 * max(rows[site] * columns for site, columns in widths.items()))
        tried = Term("matrices being tried", 20 * self.threads * max(_weights([plan]) for plan in layer))
        yield [statistics, site, tried, Term("statistics of a site", 8 * max(widths.values()) ** 2)]

    def _head(self, plan: MatrixPlan, at_work: Term) -> tuple[Term, Term]:
        """A head as it is stored, and rows that are solved; then codes are joined, and compared with the rows."""
        size = _weights([plan])
        later = max(size, memory.LOOKED_AT * min(size, LOOKED_AT))
        return self.term("weights", plan.entry.source.nbytes), self.term(at_work.name, at_work.nbytes + later)

    def _borrowed(self, layer: Layer) -> Term:
        """What experts that few tokens reach borrow from."""
        experts = [plan for plan in layer if plan.expert is not None]
        return self.term("statistics of all experts", _largest_square(experts))

    def _there_and_back(self, layer: Layer) -> Term:
        """What windows keep that run through a layer and back: those of the threads, and one that waits."""
        values = memory.GRADIENT_VALUES * self.item // 4 * (self.hidden + _widest(layer))
        return self.term("values of windows", values * self.recipe.calibration.length * (self.threads + 1))

    def _batches(self, layer: Layer) -> Term:
        return memory.running(self.tokens, self.threads, _widest(layer), self.hidden, self.item)


class _GpuRunMemory(RunMemory):
    """A run on a GPU. Main memory has the same terms throughout."""

    device: Device = "gpu"

    def throughout(self) -> Iterator[Term]:
        yield Term("interpreter", memory.WITH_MODEL)
        yield Term("libraries of CUDA", memory.WITH_CUDA)
        yield self.term("workspace of libraries", memory.CUDA_WORKSPACE)
        yield Term("vocabulary", memory.WITH_GGUF * self.gguf)
        yield Term("weights being encoded", memory.ENCODED * ENCODED_AT_ONCE * self.gguf)
        yield Term("tensor on its way", 2 * self.largest.nbytes)
        yield Term("batches fetched ahead", (memory.FETCHED + 2) * self.tokens * self.hidden * self.item)
        yield Term("codes being written", memory.STAGED_CODES * max(map(_weights, self.layers), default=0))

    def table(self) -> Iterator[Term]:
        """The embedding, while text enters."""
        if self.counted:
            yield self.term("largest tensor", self.largest.nbytes)
            yield self.term("batch", 2 * self.tokens * self.hidden * self.item)

    def running(self, layer: Layer) -> Iterator[Term]:
        """Batches, also those fetched ahead, what of them enters experts, and the statistics of one stage.

        If paired there are also the drift, its mean of fewer windows, and a square while that is made.
        """
        values = self.threads * (4 * _widest(layer) + 8 * self.hidden) + (memory.FETCHED + 2) * self.hidden
        yield self.term("batches", self.tokens * values * self.item)
        yield self.term("inputs of experts", 2 * self.tokens * self.routed(layer) * self.item)
        one = _largest_square(layer)
        yield self.term("statistics", (4 if self.paired else 1) * one + one // PANELS)

    def solving(self, layer: Layer) -> Iterator[list[Term]]:
        """Each stage: its weights, statistics and rows at work; before that what is made of its drift."""
        for rows, columns, plan in _stages(layer):
            weights, square = self.term("weights", _solved_bytes(plan) * rows * columns), 4 * columns**2
            at_once = 32 * min(rows, solved_rows(columns, gpu=True)) * columns if plan.inverts else 0
            searched = memory.GPU_SEARCH * min(MORE_ON_GPU * SEARCHED, rows * columns)
            squares = self.term("statistics", square * (_FACTORISED if plan.inverts else 2 * plan.needs_gram))
            at_work = self.term("rows at work", max(at_once, searched))
            if not plan.entry.block:
                weights, at_work = self._head(plan, at_work)
                weights = self.term("weights and codes", weights.nbytes + rows * columns)
            yield [weights, squares, self._borrowed(layer), at_work, self.feedback(layer, plan, rows * columns)]
            if self.paired and plan.inverts:
                # the Gram matrix, the drift, its own Gram matrix, their factor, and what is solved with
                yield [weights, self.term("statistics and drift", 6 * square)]


def _weights(layer: Layer) -> int:
    return sum(plan.entry.out_features * plan.entry.in_features for plan in layer)


def _code_bytes(layer: Layer) -> int:
    """Bytes of the codes of matrices; those of matrices that are pruned alone are their values."""
    return sum(plan.entry.source.nbytes if plan.entry.grid is None else _weights([plan]) for plan in layer)


def _widest(layer: Layer) -> int:
    # a pass stops before the head, whose outputs are never made
    return max(max(plan.entry.out_features * plan.inside, plan.entry.in_features) for plan in layer)


def _largest_square(layer: Layer) -> int:
    """Bytes of the largest Gram matrix."""
    return max((4 * plan.entry.in_features**2 for plan in layer if plan.needs_gram), default=0)


def _stages(layer: Layer) -> list[tuple[int, int, MatrixPlan]]:
    """Rows of all matrices that read one space and are solved as one, columns, and the last of them."""
    stages: dict[tuple[str, str], tuple[int, int, MatrixPlan]] = {}
    for plan in layer:
        key = (plan.path if plan.solved_alone else plan.space, plan.settings)
        rows = plan.entry.out_features
        stages[key] = (rows + stages[key][0] if key in stages else rows, plan.entry.in_features, plan)
    return list(stages.values())


def _solved_bytes(plan: MatrixPlan) -> int:
    """For each weight of the matrices that are solved as one."""
    return memory.PRUNED_ALONE if plan.pruner is not None and plan.solved_alone else memory.SOLVED


def _site(plan: MatrixPlan) -> str:
    """Where the channels of an input are scaled: all experts' inputs are one norm's output."""
    return plan.space if plan.expert is None or plan.path.endswith("down_proj") else plan.space.rpartition(".")[0]
