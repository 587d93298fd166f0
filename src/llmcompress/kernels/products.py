"""Products with a matrix by kernels: which one, by its grid, how its inputs are rounded and the number of tokens."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llmcompress.grids.coded import Coded
from llmcompress.grids.inputs import Rounding
from llmcompress.kernels import dequantise, ggml_products, int8, matmul, progressive
from llmcompress.kernels.compile_errors import TakesNotError
from llmcompress.kernels.ggml_layout import ROWS, block_weight
from llmcompress.kernels.int8_layout import int8_of
from llmcompress.kernels.launch import Launcher
from llmcompress.kernels.progressive_layout import progressive_of
from llmcompress.kernels.tiles import OUTPUTS, TiledWeight, tiled, tiled_floats
from llmcompress.kernels.workspace import Workspace
from llmcompress.packing.ggml import pack

_AT_ONCE = 1 << 26  # weights that are written out at once for more tokens than a kernel takes


class Products:
    """Makes products for one device, which share a workspace."""

    def __init__(self, launcher: Launcher, device: torch.device) -> None:
        self.launcher, self.workspace = launcher, Workspace(device)

    def __call__(self, coded: Coded, dtype: torch.dtype, inputs: Rounding | None) -> tuple[nn.Module, Rounding | None]:
        """A product x [tokens, in], bias [out] to [tokens, out], and the rounding of inputs left to be done before it.

        TakesNotError where no kernel takes the matrix, saying why.
        """
        if dtype not in (torch.float16, torch.bfloat16):
            raise TakesNotError(f"kernels compute in 16 bits, not in {str(dtype).removeprefix('torch.')}")
        made = _PRODUCTS.get(coded.grid.spec.type)
        if made is None:
            raise TakesNotError(f"no kernel takes the grid {coded.grid.spec.name}")
        return made(coded, dtype, inputs, self)


Made = tuple[nn.Module, Rounding | None]


def _integers(coded: Coded, dtype: torch.dtype, inputs: Rounding | None, tools: Products) -> Made:
    if inputs is not None and inputs.integers and _one_scale_per_row(coded):
        return Int8Product(coded, inputs, tools), None
    return TiledProduct(tiled(coded), dtype, tools), inputs


def _floats(coded: Coded, dtype: torch.dtype, inputs: Rounding | None, tools: Products) -> Made:
    return TiledProduct(tiled_floats(coded), dtype, tools), inputs


def _progressive(coded: Coded, dtype: torch.dtype, inputs: Rounding | None, tools: Products) -> Made:
    if inputs is None or not inputs.integers:
        raise TakesNotError("progressive products take inputs in int8")
    return ProgressiveProduct(coded, inputs, tools), None


def _blocks(coded: Coded, dtype: torch.dtype, inputs: Rounding | None, tools: Products) -> Made:
    return BlockProduct(coded, dtype, tools), inputs


_PRODUCTS: Mapping[str, Callable[[Coded, torch.dtype, Rounding | None, Products], Made]] = {
    "int": _integers,
    "mxfp4": _floats,
    "nvfp4": _floats,
    "progressive": _progressive,
    "ggml": _blocks,
}
"""What multiplies by a grid, by the grid's name."""


def _one_scale_per_row(coded: Coded) -> bool:
    grid: Any = coded.grid
    return grid.spec.bits == 8 and bool(grid.centred) and grid.spec.width(coded.codes.shape[1]) == coded.codes.shape[1]


class TiledProduct(nn.Module):
    """Integers of 2, 3, 4 or 8 bits, or floats of 4, by 16-bit inputs; above 128 tokens written out, for cuBLAS."""

    def __init__(self, weight: TiledWeight, dtype: torch.dtype, tools: Products) -> None:
        super().__init__()
        self.weight, self.dtype, self.tools = weight, dtype, tools
        self.name, self.packed_bytes = f"{'fp' if weight.spec.floats else 'w'}{weight.spec.bits}a16", weight.bytes

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [tokens, in] to [tokens, out]."""
        if 0 < x.shape[0] <= matmul.MOST_ROWS:
            return matmul.matmul(self.tools.launcher, x, self.weight, self.tools.workspace, bias)
        if self.weight.order is not None:
            x = x[:, self.weight.order]
        rows = max(1, _AT_ONCE // self.weight.inputs // OUTPUTS) * OUTPUTS
        slabs = [(at, min(at + rows, self.weight.outputs)) for at in range(0, self.weight.outputs, rows)]
        parts = [
            x @ dequantise.dequantise(self.tools.launcher, self.weight.rows(*slab), self.dtype).T for slab in slabs
        ]
        return _joined(parts, bias)


class Int8Product(nn.Module):
    """Symmetric weights of 8 bits, one scale per row, by inputs in int8, which the kernel rounds."""

    name, rounds = "w8a8", True

    def __init__(self, coded: Coded, inputs: Any, tools: Products) -> None:
        super().__init__()
        self.weight, self.inputs, self.tools = int8_of(coded), inputs, tools
        self.packed_bytes = self.weight.nbytes

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [tokens, in] to [tokens, out]."""
        codes = int8.quantise(self.tools.launcher, x, scale=self.inputs.scale)
        return int8.matmul(self.tools.launcher, codes, self.weight, self.tools.workspace, bias)


class ProgressiveProduct(nn.Module):
    """Weights in progressive groups of 4 bits by inputs in int8, which the kernel rounds."""

    name, rounds = "w4a8", True

    def __init__(self, coded: Coded, inputs: Any, tools: Products) -> None:
        super().__init__()
        self.weight, self.inputs, self.tools = progressive_of(coded), inputs, tools
        self.packed_bytes = self.weight.nbytes

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [tokens, in] to [tokens, out]."""
        codes = int8.quantise(self.tools.launcher, x, scale=self.inputs.scale)
        return progressive.matmul(self.tools.launcher, codes, self.weight, self.tools.workspace, bias)


class BlockProduct(nn.Module):
    """Blocks of GGML's types by 16-bit inputs; above 32 tokens written out in slabs, for cuBLAS."""

    def __init__(self, coded: Coded, dtype: torch.dtype, tools: Products) -> None:
        super().__init__()
        spec: Any = coded.grid.spec
        self.weight, self.dtype, self.tools = block_weight(pack(coded), spec), dtype, tools
        self.name, self.packed_bytes = spec.name, self.weight.nbytes

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [tokens, in] to [tokens, out]."""
        if x.shape[0] <= ggml_products.MOST_TOKENS:
            return ggml_products.matmul(self.tools.launcher, x, self.weight, bias)
        outputs, inputs = self.weight.shape
        rows = max(1, _AT_ONCE // inputs // ROWS) * ROWS
        slabs = [self.weight.rows(at, at + rows) for at in range(0, outputs, rows)]
        return _joined([x @ ggml_products.values(self.tools.launcher, slab, self.dtype).T for slab in slabs], bias)


def _joined(parts: list[Tensor], bias: Tensor | None) -> Tensor:
    """Outputs of slabs as one [tokens, out], with the bias."""
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return y if bias is None else y + bias
