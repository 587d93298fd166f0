"""The speed of products on a GPU, compared with torch's products and with a copy of as many bytes.

Every launch reads a weight that no cache holds: copies of it lie in more than 150 MB, one after another in turn. Times
are medians of CUDA events, each around one pass over all copies, whose launches follow one another without a wait.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from llmcompress.grids.base import INPUT_SPECS, Spec
from llmcompress.grids.blocks import BLOCK_TYPES
from llmcompress.grids.coded import Coded
from llmcompress.grids.fitting import fit
from llmcompress.grids.inputs import InputGrid
from llmcompress.grids.integer import IntegerSpec
from llmcompress.grids.progressive import ProgressiveSpec
from llmcompress.kernels.compile_errors import KernelsError
from llmcompress.kernels.launch import Launcher
from llmcompress.kernels.products import Products
from llmcompress.kernels.rivals import rivals

COLD = 150_000_000  # bytes of weights that are read in turn, at least: three times the L2 cache of an H200
SHAPES = ((4096, 4096), (8192, 8192), (22016, 4096), (4096, 11008))  # [out, in]
TOKENS = (1, 4, 8, 16, 32, 64, 128, 512)
_PASSES = 9
_MOST_COPIES = 64
_DATASHEET = {  # bytes per second, by the name that the driver gives
    "NVIDIA H200": 4.8e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H100 PCIe": 2.0e12,
    "NVIDIA A100-SXM4-80GB": 2.04e12,
    "NVIDIA A100-SXM4-40GB": 1.56e12,
    "NVIDIA L40S": 0.864e12,
}

Work = Callable[[int], object]
"""Runs once, on the copy of that number."""


@dataclass(frozen=True)
class BenchWeight:
    """A kind of weight. inputs: the rounding of its inputs, or None."""

    name: str
    spec: Spec
    inputs: str | None = None


SUBJECTS = (
    BenchWeight("w4 g128", IntegerSpec(4, 128)),
    BenchWeight("w4 g128 asym", IntegerSpec(4, 128, symmetric=False)),
    BenchWeight("w3 g128", IntegerSpec(3, 128)),
    BenchWeight("w2 g64", IntegerSpec(2, 64)),
    BenchWeight("w8 g128", IntegerSpec(8, 128)),
    BenchWeight("w8a8", IntegerSpec(8, -1), "int8-token"),
    BenchWeight("w4a8 g128", ProgressiveSpec(128), "int8-token"),
    BenchWeight("Q4_K", BLOCK_TYPES["Q4_K"]),
    BenchWeight("Q6_K", BLOCK_TYPES["Q6_K"]),
    BenchWeight("Q8_0", BLOCK_TYPES["Q8_0"]),
)


@dataclass(frozen=True)
class TimedProduct:
    """A product [tokens, in] x [in, out]. microseconds: of one, weights not in any cache. bytes: that it must read.

    of_copy: rate of those bytes as a share of a copy's; of_datasheet: of what the GPU's maker states, where known.
    times_bf16: how many times as fast as cuBLAS in bfloat16.
    """

    name: str
    shape: tuple[int, int]
    tokens: int
    microseconds: float
    bytes: int
    of_copy: float
    of_datasheet: float | None
    times_bf16: float


class Clock:
    """Times work on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copy_rate = self._copy_rate()
        self.datasheet = _DATASHEET.get(torch.cuda.get_device_name(device))

    def seconds(self, work: Work, copies: int) -> float:
        """Median time of one run, all copies in turn."""
        for number in range(copies):
            work(number)
        found = []
        for _ in range(_PASSES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for number in range(copies):
                work(number)
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3 / copies)
        return float(median(found))

    def captured(self, work: Work, copies: int) -> float:
        """`seconds` with all copies in one CUDA graph, which leaves out the host's cost of a launch."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for number in range(copies):
                work(number)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(copies):
                work(number)
        return self.seconds(lambda _: graph.replay(), 1) / copies

    def _copy_rate(self) -> float:
        """Bytes read and written per second by a copy that no cache holds."""
        source = torch.empty(1 << 29, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / self.seconds(lambda _: target.copy_(source), 1)


def bench(
    launcher: Launcher,
    clock: Clock,
    subjects: Sequence[BenchWeight],
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int] = TOKENS,
) -> Iterator[TimedProduct]:
    """Our kernels and torch's, shape by shape and subject by subject. KernelsError for memory that is not there."""
    for shape in shapes:
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(clock.device) * 0.02
        try:
            yield from _of_shape(launcher, clock, weight, subjects, tokens)
        except torch.OutOfMemoryError:
            raise KernelsError(
                f"out of GPU memory at {shape[0]} x {shape[1]}", "name smaller ones by --shape, or free the GPU"
            ) from None


def _of_shape(
    launcher: Launcher, clock: Clock, weight: Tensor, subjects: Sequence[BenchWeight], counts: Sequence[int]
) -> Iterator[TimedProduct]:
    device, shape = clock.device, (weight.shape[0], weight.shape[1])
    bf16: dict[int, float] = {}

    def timed(name: str, tokens: int, seconds: float, nbytes: int) -> TimedProduct:
        rate = nbytes / seconds
        share = None if clock.datasheet is None else rate / clock.datasheet
        times = bf16.setdefault(tokens, seconds) / seconds  # cuBLAS comes first
        return TimedProduct(name, shape, tokens, seconds * 1e6, nbytes, rate / clock.copy_rate, share, times)

    for rival in rivals(weight.to(torch.bfloat16), weight, counts):
        held = [rival.copy() for _ in range(_copies(rival.nbytes))]
        for tokens in rival.tokens:
            x = rival.prepare(_inputs(tokens, shape[1], device))
            yield timed(rival.name, tokens, _seconds(clock, rival.work, x, held), rival.nbytes)
        held.clear()
    for subject in subjects:
        products = _products(launcher, device, weight, subject)
        nbytes = int(products[0].packed_bytes)
        for tokens in counts:
            x = _inputs(tokens, shape[1], device)
            yield timed(subject.name, tokens, _seconds(clock, lambda x, one: one(x, None), x, products), nbytes)


def _products(launcher: Launcher, device: torch.device, weight: Tensor, subject: BenchWeight) -> list[Any]:
    """Copies of a weight, enough that no cache holds the next copy."""
    spec: Any = subject.spec
    grid = fit(weight, spec, clip="minmax", search="fast")
    inputs = None if subject.inputs is None else InputGrid(INPUT_SPECS[subject.inputs])
    tools = Products(launcher, device)
    first: Any = tools(Coded(grid.encode(weight), grid), torch.bfloat16, inputs)[0]
    return [first, *(deepcopy(first, {id(tools): tools}) for _ in range(_copies(first.packed_bytes) - 1))]


def _inputs(tokens: int, width: int, device: torch.device) -> Tensor:
    return torch.randn(tokens, width, device=device, dtype=torch.bfloat16)


def _seconds(clock: Clock, work: Callable[[Tensor, Any], object], x: Tensor, held: Sequence[Any]) -> float:
    return clock.captured(lambda number: work(x, held[number]), len(held))


def _copies(nbytes: int) -> int:
    return min(_MOST_COPIES, COLD // max(nbytes, 1) + 1)
