"""What a GPTQ run on a large model takes, counted from its shapes: the table of docs/scaling.md.

    python benchmarks/scale.py

Nothing is measured here. Operations, bytes and memory follow from what the code does (named beside each formula);
rates are those of data sheets times the share in `Machine` that is assumed to be reached.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from llmcompress.solve.row_blocks import SOLVED_ROWS, even_block

# a Llama of 405 billion weights; calibration: 128 windows of 2048 tokens
LAYERS, HIDDEN, FFN, HEADS, KV_HEADS = 126, 16384, 53248, 128, 8
SAMPLES, LENGTH = 128, 2048
TOKENS = SAMPLES * LENGTH
KV = HIDDEN // HEADS * KV_HEADS
UPPER = sum(range(1, 9)) / 64  # of a Gram matrix, in 8 panels from the diagonal on (stats/gram.py)
BF16, F32 = 2, 4


@dataclass(frozen=True)
class Stage:
    """Matrices that read one input of `width` channels, `rows` of them together."""

    name: str
    width: int
    rows: int

    @property
    def block(self) -> int:
        return even_block(self.rows, SOLVED_ROWS)

    @property
    def pieces(self) -> int:
        return ceil(self.rows / self.block)


STAGES = (
    Stage("q, k, v", HIDDEN, HIDDEN + 2 * KV),
    Stage("o", HIDDEN, HIDDEN),
    Stage("gate, up", HIDDEN, 2 * FFN),
    Stage("down", FFN, HIDDEN),
)


@dataclass(frozen=True)
class Machine:
    """GPUs, and what they reach: operations and bytes each second; a column of a sweep in seconds of kernel starts.

    H200 SXM by its data sheet: bfloat16 989, TF32 494, float64 and float32 67 TFLOPS, NVLink 450 GB/s each way; 400
    Gb/s of InfiniBand for each GPU. Half of that for products, 70% of it for links. disk: of the work directory.
    """

    name: str
    ranks: int
    link: float
    disk: float
    bf16: float = 989e12 / 2
    tf32: float = 494e12 / 2
    float64: float = 67e12 / 2
    float32: float = 67e12 / 2
    column: float = 13 * 6e-6  # kernels for a column in sweep and descent together, at 6 microseconds


MACHINES = (
    Machine("1 GPU", 1, float("inf"), 6e9),
    Machine("8 GPUs, 1 node", 8, 0.7 * 450e9, 6e9),
    Machine("32 GPUs, 4 nodes", 32, 0.7 * 50e9, 12e9),
)


def total(of: Callable[[Stage], float]) -> float:
    """A sum over the stages of a layer."""
    return sum(of(stage) for stage in STAGES)


WEIGHTS = total(lambda s: s.rows * s.width)


@dataclass(frozen=True)
class Work:
    """What a layer takes. again: tokens that also run through the original model; 0 with --qep-alpha 0."""

    again: int

    @property
    def operations(self) -> dict[str, float]:
        """Every matrix runs once, since what enters and leaves modules is recorded (engine/run/forward.py).

        Factor: Cholesky and inverse (solve/damping.py). Correction: Cholesky, a product, two solves (solve/correct.py).
        Sweep and descent: 1 and 5 times rows * width^2 (solve/column_sweep.py, solve/refine.py). Loss and
        energy of a matrix, by half of their products (engine/run/rtn_ratio.py).
        """
        drift = self.again > 0
        return {
            "forward": (TOKENS + self.again) * (2 * WEIGHTS + 2 * LENGTH * HIDDEN),
            "Gram matrices": total(lambda s: 2 * TOKENS * s.width**2 * UPPER),
            "drift": total(lambda s: 2 * self.again * s.width**2),
            "factors, float64": total(lambda s: 2 / 3 * s.width**3),
            "correction": drift * total(lambda s: s.width**3 / 3 + 4 * s.rows * s.width**2),
            "sweep and descent": total(lambda s: 6 * s.rows * s.width**2),
            "loss for the report": total(lambda s: 2 * s.rows * s.width**2),
        }

    @property
    def received(self) -> dict[str, float]:
        """Bytes that each rank gets from the others together, less its own share."""
        drift = self.again > 0
        sums = UPPER * (1 + drift) + drift  # a Gram matrix also when the original model's windows end
        aims = drift * total(lambda s: s.rows * s.width * F32)
        return {
            "inputs of stages": total(lambda s: (TOKENS + self.again) * s.width * BF16),
            "Gram matrices and drift": total(lambda s: sums * s.width**2 * F32),
            "factors, aims, codes": total(lambda s: s.width**2 * F32 + s.rows * s.width) + aims,
            "outputs": (TOKENS + self.again) * HIDDEN * BF16,
        }

    @property
    def memory(self) -> dict[str, float]:
        """Bytes of a rank while down_proj is solved, as engine/plan/run_memory.py counts them, and one factor sent.

        A rank that does not correct has a drift and its Gram matrix all the while.
        """
        drift, last = self.again > 0, STAGES[-1]
        square = last.width**2 * F32
        return {
            "layer in bfloat16": (1 + drift) * WEIGHTS * BF16,
            "square matrices of down_proj's inputs": (6 if drift else 4) * square,
            "statistics of the layer": total(lambda s: s.width**2 * F32),
            "weights of down_proj, 16 bytes each": 16 * last.rows * last.width,
            "rows at work": 32 * SOLVED_ROWS * last.width,
            "the factor on its way to other ranks": square,
        }

    @property
    def disk(self) -> dict[str, float]:
        """Bytes of the work directory: hidden states that enter and leave a layer, what its modules read and give."""
        tokens = (TOKENS + self.again) * BF16
        return {"hidden states": 2 * tokens * HIDDEN, "records of all ranks": tokens * (2 * HIDDEN + FFN)}


def seconds(machine: Machine, work: Work) -> dict[str, float]:
    """What a layer takes, by part of the work."""
    ranks, count = machine.ranks, work.operations
    heaviest = max(8 / 36, 1 / ranks)  # share of the panels of a Gram matrix that one rank has
    factor = count["factors, float64"] / machine.float64
    correction = count["correction"] / machine.float32
    return {
        "forward": count["forward"] / ranks / machine.bf16,
        "Gram matrices and drift": (count["Gram matrices"] * heaviest + count["drift"] * max(1 / ranks, 1 / 4))
        / machine.tf32,
        "factor and correction": factor + correction if ranks == 1 else max(factor, correction),
        "sweep and descent": total(lambda stage: ceil(stage.pieces / ranks) * piece(machine, stage)),
        "loss for the report": count["loss for the report"] / min(ranks, 2) / machine.float32,
        "between ranks": sum(work.received.values()) * (1 - 1 / ranks) / machine.link,
        "reading weights": WEIGHTS * BF16 / machine.disk,
        "hidden states and records": 2 * sum(work.disk.values()) / machine.disk,  # written once, read once
    }


def piece(machine: Machine, stage: Stage) -> float:
    """Seconds for the rows of a stage that are solved at once: arithmetic, or the starts of its kernels."""
    return max(6 * min(stage.block, stage.rows) * stage.width**2 / machine.float32, stage.width * machine.column)


def table(head: list[str], rows: list[list[str]]) -> None:
    """Print rows as Markdown."""
    print("| " + " | ".join(head) + " |")
    print("| --- |" + " ---: |" * (len(head) - 1))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def rows(*columns: dict[str, float], unit: float, last: str) -> list[list[str]]:
    """Rows of tables that have the same keys, in units, and their sums."""
    found = [[name, *(f"{column[name] / unit:,.1f}" for column in columns)] for name in columns[0]]
    return [*found, [last, *(f"{sum(column.values()) / unit:,.1f}" for column in columns)]]


def main() -> None:
    both = (Work(16 * LENGTH), Work(0))
    names = ["as usual", "--qep-alpha 0"]
    for head, unit, found in (
        ("operations of a layer, 10^12", 1e12, [work.operations for work in both]),
        ("received by each rank for a layer, GB", 1e9, [work.received for work in both]),
        ("memory of each rank at most, GB", 1e9, [work.memory for work in both]),
        ("work directory, GB", 1e9, [work.disk for work in both]),
    ):
        table([head, *names], rows(*found, unit=unit, last="together"))
    times = [seconds(machine, both[1]) for machine in MACHINES]
    lines = rows(*times, unit=1, last="a layer")
    hours = [f"{sum(found.values()) * LAYERS / 3600:,.1f}" for found in times]
    table(
        ["seconds for a layer, --qep-alpha 0", *(machine.name for machine in MACHINES)],
        [*lines, [f"{LAYERS} layers, hours", *hours]],
    )


if __name__ == "__main__":
    main()
