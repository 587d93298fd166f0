"""The memory model: terms that are alive at once, phase by phase; the peak of a command is its largest phase.

Runs on a processor or a GPU, passes of text (depth, width, lora, fit) and validation list their phases in these terms.
A small number in a phase counts bytes of tensors, which the term's name or a comment lists. Of the constants here,
"fitted" ones were chosen so that peaks that are measured (test_memory.py, test_pass_memory.py) are within 10% of the
estimate; "counted" ones follow from the code; "assumed" ones are measured by no test.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

MARGIN = 1.1  # an estimate times this must fit into a limit, since a peak may exceed its estimate by a tenth

# What the code holds at once: the modules that do so import these numbers.
FETCHED = 2  # batches on their way to a GPU
HEAD_TOKENS = 128  # tokens of which all logits, and a few tensors as large, are in memory

# Bytes of a process, whatever the model.
WITH_MODEL = 298_000_000  # fitted: Python with torch and transformers' model code, without the files of libraries
WITHOUT_MODEL = 284_000_000  # fitted: the same for a run that builds no model
WITH_GGUF = 26_000_000  # fitted: more with the gguf package and a vocabulary
FLOAT32_ALGEBRA = 12_000_000  # fitted: more once a pass factorises a matrix in float32
EXPERT_PRODUCTS = 50_000_000  # fitted: code that torch keeps for the numbers of rows that come to experts
PER_THREAD = 24_000_000  # fitted: buffers that torch's libraries keep for each thread but the first
WITH_CUDA = 2_500_000_000  # assumed: what CUDA's libraries and driver take of main memory
CUDA_CONTEXT = 600_000_000  # assumed: what CUDA's context, libraries and kernels take of the GPU
CUDA_WORKSPACE = 100_000_000  # assumed: what cuBLAS and cuSOLVER take of the GPU to work in

# Bytes for each number that is worked on.
ALGEBRA = 20  # fitted, for each number of the largest matrix that is factorised
ALGEBRA_COLUMNS = 1536  # fitted, in columns and not in bytes: of that matrix, those beyond take nothing more
COPIED = 1.4  # fitted, for each byte of the largest tensor: when it is read, freed memory is not all given back yet
ENCODED = 12  # fitted, for each weight of a chunk that is encoded for GGUF
ROTATED = 3  # fitted, for each byte of the largest tensor where it is rotated, which is done in float32
ROTATED_ROWS = 40  # fitted, for each number of the rows that are being rotated, in float64
OUTPUT_SEARCH = 96  # fitted, for each number of the rows whose ranges are searched by the error of outputs
LOOKED_AT = 24  # fitted, for each weight that is compared with its value: both, the error, and what decoding takes
GPU_SEARCH = 40  # assumed, for each weight whose scale is searched on a GPU
SCALE_TOKENS = 1024  # counted, in tokens and not in bytes: kept of an input where scales are searched
STAGED_CODES = 2  # counted, for each weight of a layer while its codes, from the GPU, are written
LOGIT_GRADIENT = 30  # fitted, for each logit of the tokens at the head, where gradients begin
LOGIT_DRAWN = 16  # fitted, the same where nothing is to be known of the head itself
LOGIT_DIVERGENCE = 22  # fitted, for each logit of the tokens at the head, where divergences are taken
READ_ON_DEMAND = 14  # counted, for each weight: decoded in float32, a product on the way, its code, and as it is used
BEING_DECODED = 7  # counted, for each weight: its value, its code as stored and alone, and its scale spread over rows
LOGIT_AGREEMENT = 24  # counted, for each logit of a validated window: six tensors of float32
WRITTEN_CHANCES = 36  # counted, for each logit of the tokens that are drawn at once: three of float32, three of float64
DRAFT_LOGITS = 7  # fitted, for each logit of a draft head at each depth, and its gradient
DRAFT_SCORES = 16  # fitted, for each pair of tokens and each head of attention of a draft head, at each depth
GRADIENT_VALUES = 32  # fitted, for each token and row of the largest matrix, or hidden channel: kept for gradients
ROUNDED = 40  # fitted, for each weight of the rows that are rounded at once, beside SOLVED
SOLVED = 16  # fitted, for each weight of the matrices that are solved as one
PRUNED_ALONE = 28  # fitted, for each weight of a matrix that is pruned without statistics, and so is solved alone
TRAINED = 0.5  # assumed, for each weight: the factor of its group, what is learnt of it, its gradient, and the best
LEARNT = 20  # counted, for each number learnt of weights: what is learnt, its gradient, two of Adam's, and the best
TRAINING_STATE = 32  # counted, of a disk, for each of these: four of them, twice while they are written anew
DECODED = 12 << 24  # counted, in all: packed weights that are decoded at once in validation, codes and temporaries too


Device = Literal["host", "gpu"]


class Term(NamedTuple):
    """Bytes of one thing in the memory of a device."""

    name: str
    nbytes: int
    device: Device = "host"


class Phase(NamedTuple):
    """Terms that are alive at once."""

    name: str
    terms: Sequence[Term]


class MemoryModel(NamedTuple):
    """throughout: terms that are alive in every phase. phases: each begins when the one before has been freed."""

    throughout: Sequence[Term]
    phases: Sequence[Phase]

    def peak(self, device: Device) -> int:
        """Bytes of a device in its largest phase."""
        most = max((_on(device, phase.terms) for phase in self.phases), default=0)
        return _on(device, self.throughout) + most


def _on(device: Device, terms: Iterable[Term]) -> int:
    return sum(term.nbytes for term in terms if term.device == device)


def process(threads: int, algebra: int) -> list[Term]:
    """A process that runs text through a model. algebra: bytes that it takes because it factorises matrices."""
    buffers = Term("buffers of threads", PER_THREAD * (threads - 1))
    return [Term("interpreter", WITH_MODEL), buffers, Term("linear algebra", algebra)]


def algebra(columns: int) -> int:
    """Bytes that libraries keep once a matrix of so many columns is factorised in float64; none for no columns."""
    return ALGEBRA * min(columns, ALGEBRA_COLUMNS) ** 2


def entering(tokens: int, hidden: int, item: int) -> Term:
    """A batch that is embedded: four values of the hidden width for each token."""
    return Term("batch", 4 * tokens * hidden * item)


def running(tokens: int, threads: int, widest: int, hidden: int, item: int) -> Term:
    """Batches in a layer, of each thread and one whose result waits: three wide and eight narrow values of each token.

    tokens: of a batch. widest: most rows or columns of a matrix of the layer.
    """
    return Term("batches", tokens * (threads + 1) * (3 * widest + 8 * hidden) * item)


def running_without_experts(tokens: int, threads: int, widest: int, item: int) -> Term:
    """The same in a layer of which no expert is computed: three values of each token, as wide as its other matrices."""
    return Term("batches", 3 * tokens * (threads + 1) * widest * item)
