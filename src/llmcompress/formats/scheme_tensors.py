"""Codes of a matrix to and from the tensors of compressed-tensors checkpoints (`compressed_tensors` says which)."""

from typing import TYPE_CHECKING, cast

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Entry
from llmcompress.formats.entry_checks import affine_grid, stored_scale
from llmcompress.formats.schemes import FLOATS
from llmcompress.grids.base import Spec
from llmcompress.grids.float8 import Float8Spec
from llmcompress.grids.integer import IntegerSpec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded


def words_for(count: int, bits: int) -> int:
    """32-bit words that `count` codes take."""
    return -(-count * bits // 32)


def packed_tensors(entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
    """Tensors of a matrix whose codes are packed into words, by their names behind the module's."""
    import torch

    from llmcompress.packing.bits import pack

    grid, bits = affine_grid(entry, coded), coded.grid.spec.bits
    tensors = {
        "weight_packed": pack(coded.codes, bits),
        "weight_scale": stored_scale(entry, coded, entry.source.dtype),
        "weight_shape": torch.tensor([entry.out_features, entry.in_features], dtype=torch.int64),
    }
    if not grid.spec.symmetric:
        tensors["weight_zero_point"] = pack(grid.zero.t().to(torch.int64), bits).t()
    return tensors


def byte_tensors(entry: Entry, coded: "Coded", how: str) -> "dict[str, Tensor]":
    """Tensors of a matrix with one code a byte, stored as `how` says, by their names behind the module's."""
    import torch

    codes = coded.codes.contiguous()
    weight = codes.view(torch.float8_e4m3fn) if how == FLOATS else (codes ^ 0x80).view(torch.int8)  # code - 128
    return {
        "weight": weight,
        "weight_scale": stored_scale(entry, coded, entry.source.dtype),
    }


def read_packed(
    module: str, spec: Spec, shape: tuple[int, int], words: "Tensor", scale: "Tensor", points: "Tensor | None"
) -> "Coded":
    """The inverse of `packed_tensors`, for a matrix of `shape`; CheckpointError for tensors of other shapes."""
    import torch

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.integer import IntegerGrid
    from llmcompress.grids.scales import natural_groups
    from llmcompress.packing.bits import unpack

    rows, width = shape
    groups = spec.groups(width)
    if tuple(words.shape) != (rows, words_for(width, spec.bits)) or tuple(scale.shape) != (rows, groups):
        raise CheckpointError(f"tensors of {module} do not have the shapes of {spec.name}")
    zero = torch.full((rows, groups), float(spec.middle))
    if points is not None:
        if tuple(points.shape) != (words_for(rows, spec.bits), groups):
            raise CheckpointError(f"zero points of {module} do not have the shape of {spec.name}")
        zero = unpack(points.t().contiguous(), spec.bits, rows).t().to(torch.float32).contiguous()
    grid = IntegerGrid(cast("IntegerSpec", spec), scale.to(torch.float32), zero, natural_groups(spec, width))
    return Coded(unpack(words, spec.bits, width), grid)


def read_bytes(module: str, spec: Spec, weight: "Tensor", scale: "Tensor") -> "Coded":
    """The inverse of `byte_tensors`; CheckpointError for tensors of other types or shapes."""
    import torch

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.float8 import FloatGrid
    from llmcompress.grids.integer import IntegerGrid
    from llmcompress.grids.scales import natural_groups

    rows, width = weight.shape
    groups = spec.groups(width)
    if weight.dtype != (torch.int8 if spec.affine else torch.float8_e4m3fn) or not spec.symmetric:
        raise CheckpointError(f"{module}.weight does not hold codes of {spec.name}")
    if scale.numel() == 1:  # of the whole matrix
        scale = scale.reshape(1, 1).expand(rows, groups)
    if tuple(scale.shape) != (rows, groups):
        raise CheckpointError(f"tensors of {module} do not have the shapes of {spec.name}")
    scale, index = scale.to(torch.float32).contiguous(), natural_groups(spec, width)
    codes = weight.view(torch.uint8)
    if not spec.affine:
        floats = FloatGrid(cast("Float8Spec", spec), scale, index)
        if not floats.numbers(codes):
            raise CheckpointError(f"{module}.weight holds values that are no numbers")
        return Coded(codes, floats)
    zero = torch.full((rows, groups), float(spec.middle))
    return Coded(codes ^ 0x80, IntegerGrid(cast("IntegerSpec", spec), scale, zero, index))
