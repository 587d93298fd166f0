"""Codes of a matrix to and from the tensors of compressed-tensors checkpoints (`compressed_tensors` says which)."""

from math import prod
from typing import TYPE_CHECKING, cast

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Entry, Specs
from llmcompress.formats.entry_checks import affine_grid, stored_scale
from llmcompress.formats.schemes import FLOATS, scale_shape, scale_type
from llmcompress.grids.base import Spec
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
        "weight_scale": stored_scale(entry, coded, scale_type(entry)),
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
    shape = scale_shape(coded.grid.spec, *codes.shape)
    return {"weight": weight, "weight_scale": stored_scale(entry, coded, scale_type(entry), shape)}


def check_shapes(module: str, spec: Spec, shape: tuple[int, int], specs: Specs) -> None:
    """CheckpointError unless scales, and codes that are packed, have the shapes of a matrix [out, in] on a grid."""
    rows, width = shape
    if own := spec.parts(rows, width):
        for name, (dtype, extents) in own.items():
            part = specs.get(f"{module}.{name}")
            fits = part is not None and (part.shape == extents or prod(part.shape) == prod(extents) == 1)
            if part is None or part.dtype != dtype or not fits:
                raise CheckpointError(f"{module}.{name} is not {dtype} {list(extents)}, as {spec.name} has it")
        return
    scale = specs[f"{module}.weight_scale"]
    if width % spec.width(width) or (scale.shape != (rows, spec.groups(width)) and prod(scale.shape) != 1):
        raise CheckpointError(
            f"{module}.weight_scale is {list(scale.shape)}, which are not the scales of {rows} x {width} weights on "
            f"{spec.name}"
        )
    words = specs.get(f"{module}.weight_packed")
    if words is not None and words.shape != (rows, words_for(width, spec.bits)):
        raise CheckpointError(
            f"{module}.weight_packed is {list(words.shape)}, which does not hold {rows} x {width} codes of {spec.name}"
        )


def read_packed(
    module: str,
    spec: Spec,
    shape: tuple[int, int],
    words: "Tensor",
    scale: "Tensor",
    points: "Tensor | None",
    order: "Tensor | None" = None,
) -> "Coded":
    """The inverse of `packed_tensors`, for a matrix of `shape`; CheckpointError for tensors of other shapes.

    points: packed, or one signed a byte, as older files have them. order [in]: the group of each input channel.
    """
    from llmcompress.packing.bits import unpack

    rows, width = shape
    if tuple(words.shape) != (rows, words_for(width, spec.bits)):
        raise CheckpointError(f"tensors of {module} do not have the shapes of {spec.name}")
    return _integers(module, spec, unpack(words, spec.bits, width), scale, points, order)


def read_bytes(module: str, spec: Spec, weight: "Tensor", scale: "Tensor", points: "Tensor | None") -> "Coded":
    """The inverse of `byte_tensors` for integers; CheckpointError for tensors of other types or shapes."""
    import torch

    if weight.dtype != torch.int8 or spec.bits != 8:
        raise CheckpointError(f"{module}.weight does not hold codes of {spec.name}")
    return _integers(module, spec, weight.view(torch.uint8) ^ 0x80, scale, points, None)


def _integers(
    module: str, spec: Spec, codes: "Tensor", scale: "Tensor", points: "Tensor | None", order: "Tensor | None"
) -> "Coded":
    import torch

    from llmcompress.grids.coded import Coded
    from llmcompress.grids.integer import IntegerGrid
    from llmcompress.grids.scales import natural_groups
    from llmcompress.packing.bits import unpack

    rows, width = codes.shape
    groups = spec.groups(width)
    scale = scale.reshape(1, 1).expand(rows, groups) if scale.numel() == 1 else scale  # of the whole matrix
    if tuple(scale.shape) != (rows, groups):
        raise CheckpointError(f"tensors of {module} do not have the shapes of {spec.name}")
    zero = torch.full((rows, groups), float(spec.middle))
    if points is not None and points.dtype == torch.int8:
        if points.numel() not in (1, rows * groups):
            raise CheckpointError(f"zero points of {module} do not have the shape of {spec.name}")
        zero = zero + (points.reshape(-1, 1) if points.numel() == 1 else points.reshape(rows, groups))
    elif points is not None:
        if tuple(points.shape) != (words_for(rows, spec.bits), groups):
            raise CheckpointError(f"zero points of {module} do not have the shape of {spec.name}")
        zero = unpack(points.t().contiguous(), spec.bits, rows).t().to(torch.float32).contiguous()
    index = natural_groups(spec, width) if order is None else order.to(torch.int64)
    if index.shape != (width,) or bool((index < 0).any()) or bool((index >= groups).any()):
        raise CheckpointError(f"{module}.weight_g_idx does not name one of {groups} groups for each of {width} inputs")
    values = scale.to(torch.float32).contiguous()
    if not bool(values.isfinite().all()):
        raise CheckpointError(f"{module} has scales that are not finite")
    return Coded(codes, IntegerGrid(cast("IntegerSpec", spec), values, zero, index))
