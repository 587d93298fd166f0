"""Matrices of 8-bit floats back from a weight F8_E4M3 [out, in] and its scales, however many weights share one.

Scales multiply. They are one number; one for each row, [out] or [out, 1]; or one for each tile, [row tiles, column
tiles], which some write as [row tiles, 1, column tiles, 1]. Bytes are powers of two, 2^(byte - 127).
"""

from typing import TYPE_CHECKING

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Specs
from llmcompress.formats.packed_format import matrix_shape
from llmcompress.grids.tiled_floats import TiledFloatSpec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded

Tile = tuple[int, int]
_SCALES = ("F32", "F16", "BF16", "U8", "F8_E8M0")


def tiles(shape: Tile, tile: Tile) -> Tile:
    """How many tiles cover a matrix, along its rows and along its columns."""
    return -(-shape[0] // tile[0]), -(-shape[1] // tile[1])


def float8_shape(module: str, specs: Specs, scale: str, tile: Tile | None) -> tuple[int, int]:
    """[out, in] of a module's weight; CheckpointError unless `scale` is of a shape that the weight can have.

    tile: of how many rows and columns; None where all weights, or those of a row, share one scale.
    """
    shape, stored = matrix_shape(specs, f"{module}.weight"), specs.get(f"{module}.{scale}")
    if shape is None or specs[f"{module}.weight"].dtype != "F8_E4M3":
        raise CheckpointError(f"{module}.weight is no matrix of 8-bit floats, and {scale} stands beside it")
    if stored is None or stored.dtype not in _SCALES:
        raise CheckpointError(f"{module} has no {scale} of a type that scales have")
    extents = tuple(extent for extent in stored.shape if extent != 1)
    rows = (shape[0],) if shape[0] != 1 else ()
    if extents == () and (tile is None or tiles(shape, tile) == (1, 1)):
        return shape
    wanted = rows if tile is None else tuple(extent for extent in tiles(shape, tile) if extent != 1)
    if extents != wanted:
        many = "one, or one a row" if tile is None else f"one for each {tile[0]} x {tile[1]} weights"
        raise CheckpointError(
            f"{module}.{scale} is {list(stored.shape)}, which are not the scales of {list(shape)} weights, {many}"
        )
    return shape


def scale_values(module: str, scale: "Tensor") -> "Tensor":
    """Scales as float32; CheckpointError for values that no scale has."""
    import torch

    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    found = scale.to(torch.float32)
    if not bool(found.isfinite().all() and (found >= 0).all()):
        raise CheckpointError(f"{module} has scales that are not finite, or below zero")
    return found


def read_float8(module: str, weight: "Tensor", scale: "Tensor", tile: Tile | None, *, one: bool = False) -> "Coded":
    """The matrix of a weight [out, in] and scales that `float8_shape` let pass; CheckpointError for other values.

    one: whether it is on the grid of one scale for a whole matrix, where there is one; else all rows have the same.
    """
    import torch

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.float8 import Float8Spec, FloatGrid
    from llmcompress.grids.float8_tensor import Float8TensorSpec, TensorFloatGrid
    from llmcompress.grids.scales import natural_groups
    from llmcompress.grids.tiled_floats import TiledFloatGrid

    rows, width = weight.shape
    codes, values = weight.view(torch.uint8), scale_values(module, scale)
    grid: FloatGrid | TiledFloatGrid
    if tile is None:
        by_row = values.reshape(-1, 1).expand(rows, 1).contiguous()
        index = natural_groups(Float8Spec(), width)
        if one and values.numel() == 1:
            grid = TensorFloatGrid(Float8TensorSpec(), by_row, index)
        else:
            grid = FloatGrid(Float8Spec(), by_row, index)
    else:
        spread = values.reshape(tiles((rows, width), tile)).repeat_interleave(tile[0], dim=0)[:rows]
        grid = TiledFloatGrid(TiledFloatSpec(*tile), spread)
    if not grid.numbers(codes):
        raise CheckpointError(f"{module}.weight holds values that are no numbers")
    return Coded(codes, grid)
