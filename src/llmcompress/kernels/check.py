"""Checks of kernels on this machine's device: products of every family compared with float64."""

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from llmcompress.errors import LlmcompressError
from llmcompress.grids.base import INPUT_SPECS, Spec
from llmcompress.grids.blocks import BLOCK_TYPES
from llmcompress.grids.coded import Coded
from llmcompress.grids.fitting import fit
from llmcompress.grids.inputs import InputGrid
from llmcompress.grids.integer import IntegerSpec
from llmcompress.grids.mxfp4 import GRID as MXFP4
from llmcompress.grids.nvfp4 import GRID as NVFP4
from llmcompress.grids.progressive import ProgressiveSpec
from llmcompress.kernels.build import Builder
from llmcompress.kernels.ggml_layout import TYPES
from llmcompress.kernels.launch import Launcher
from llmcompress.kernels.products import Products
from llmcompress.kernels.variants import variants

TOKENS = (1, 3, 8, 16, 33, 128, 200)
SHAPE = (1008, 1056)  # of weights: no multiple of any tile
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_SUMS = 2.0**-22  # of the sum of magnitudes: rounding of sums in float32, whatever their order
_WRITTEN = {"dequantise", "ggml_values"}  # kernels that round weights to 16 bits, for cuBLAS
_OUTLIER = 60.0  # one in every 97 inputs is as many times as large

Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class KernelCase:
    """A weight on a grid with any rounding of its inputs, the type it computes in, and how many tokens it meets.

    shape: of the weight, [out, in], cut to what its grid divides.
    """

    spec: Spec
    dtype: torch.dtype
    inputs: str | None = None
    shape: tuple[int, int] = SHAPE
    tokens: tuple[int, ...] = TOKENS


@dataclass(frozen=True)
class Checked:
    """The outcome of a case. error: the largest, as a share of its bound. launches: names of the kernels that ran."""

    grid: str
    inputs: str | None
    dtype: str
    tokens: int
    error: float
    launches: tuple[str, ...]
    failed: str | None = None

    @property
    def ok(self) -> bool:
        return self.failed is None and self.error < 1 and bool(self.launches)


def cases() -> Iterator[KernelCase]:
    """Every family with the grids that it takes."""
    for dtype in (torch.float16, torch.bfloat16):
        for bits, group, symmetric in product((2, 3, 4, 8), (32, 64, 128, -1), (True, False)):
            yield KernelCase(IntegerSpec(bits, group, symmetric), dtype)
        for floats in (MXFP4.made, NVFP4.made):
            yield KernelCase(floats, dtype)
        for inputs in ("int8-token", "int8-tensor"):
            yield KernelCase(IntegerSpec(8, -1), dtype, inputs)
        for group in (32, 64, 128):
            yield KernelCase(ProgressiveSpec(group), dtype, "int8-token")
        for name in TYPES:
            yield KernelCase(BLOCK_TYPES[name], dtype)


def build_all(builder: Builder, threads: int, watch: Watch) -> dict[str, int]:
    """Compile every variant that the cache lacks; how many each family has. CompileError for the first that fails."""
    found = list(variants(builder.architecture))
    with ThreadPoolExecutor(threads) as pool:
        for number, _ in enumerate(pool.map(lambda item: builder(item[1]), found)):
            watch(number + 1, len(found))
    return {family: sum(name == family for name, _ in found) for family in dict.fromkeys(name for name, _ in found)}


def check(case: KernelCase, launcher: Launcher, device: torch.device) -> Iterator[Checked]:
    """A case with each number of its tokens."""
    generator = torch.Generator().manual_seed(0)
    spec: Any = case.spec
    outputs, inputs = case.shape
    inputs = inputs // spec.width(inputs) * spec.width(inputs)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.05
    grid = fit(weight, spec, clip="minmax", search="fast")
    coded = Coded(grid.encode(weight), grid).to(device)
    rounding = _rounding(case, generator, device)
    bias = torch.randn(outputs, generator=generator).to(device, case.dtype)
    exact, multiply = coded.decode().to(torch.float64), None
    for count in case.tokens:
        x = torch.randn(count, inputs + 8, generator=generator)
        x[:, ::97] *= _OUTLIER
        x = x.to(device, case.dtype)[:, :inputs]  # rows do not follow one another
        counting = _Counting(launcher)
        about = spec.name, case.inputs, str(case.dtype).removeprefix("torch."), count
        try:
            if multiply is None:
                multiply, left = Products(counting, device)(coded, case.dtype, rounding)
                assert left is None
            multiply.tools.launcher = counting  # type: ignore[union-attr]
            y = multiply(x, bias)
        except LlmcompressError as error:
            yield Checked(*about, float("inf"), tuple(counting.names), error.message)
            continue
        yield Checked(*about, _error(y, x, exact, bias, rounding, counting.names), tuple(dict.fromkeys(counting.names)))


class _Counting:
    """A launcher that passes launches on and records the names of their kernels."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher, self.names = launcher, list[str]()
        self.architecture, self.multiprocessors = launcher.architecture, launcher.multiprocessors

    def __call__(self, launch: Any, *arguments: Tensor | int | float) -> None:
        self._launcher(launch, *arguments)
        self.names.append(launch.kernel.name)


def _rounding(case: KernelCase, generator: torch.Generator, device: torch.device) -> InputGrid | None:
    if case.inputs is None:
        return None
    spec = INPUT_SPECS[case.inputs]
    return InputGrid(spec, None if spec.dynamic else torch.tensor([0.05], device=device))


def _error(
    y: Tensor, x: Tensor, exact: Tensor, bias: Tensor, rounding: InputGrid | None, names: Collection[str]
) -> float:
    """Largest error of y as a share of what rounding allows: of outputs, of sums, of weights that are written out."""
    if rounding is None:
        seen = x.to(torch.float64)
    else:
        scales = rounding.scales(x)
        seen = rounding.levels(x, scales).to(torch.float64) * scales.to(torch.float64)
    wanted = seen @ exact.T + bias.to(torch.float64)
    magnitudes = seen.abs() @ exact.abs().T + bias.to(torch.float64).abs()
    unit = _ROUNDING[x.dtype]
    sums = _SUMS * exact.shape[1] ** 0.5 + (unit if _WRITTEN.intersection(names) else 0.0)
    error = ((y.to(torch.float64) - wanted).abs() / (2 * unit * wanted.abs() + sums * magnitudes + 1e-30)).max()
    return float(error) if bool(torch.isfinite(error)) else float("inf")
