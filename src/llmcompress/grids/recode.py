"""From codes on an integer grid to a block type of GGML that holds the same values: nothing is rounded anew."""

import torch
from torch import Tensor

from llmcompress.grids.base import Spec
from llmcompress.grids.blocks import BlockGrid, BlockSpec
from llmcompress.grids.coded import Coded
from llmcompress.grids.grid_type import type_of
from llmcompress.grids.scales import float16

_HALF_STEP = 2.0**-11  # of float16, relative


def recode(coded: Coded, spec: Spec) -> Coded | None:
    """The same matrix [out, in] in a block type; None where that has no place for its levels, scales or groups.

    Levels are kept. A type holds them if it has one scale per block, each of its blocks lies in one group, and levels
    (without minima) or codes (with minima) lie in its range. Scales, and minima zero * scale, are rounded to float16
    where they are no such values; None where a scale has no float16 near it.
    """
    grid, width = coded.grid, coded.codes.shape[1]
    if not isinstance(spec, BlockSpec) or not spec.holds_codes:
        return None
    if grid.spec.zero_points is None or width % spec.block_size:
        return None
    index = grid.group_index.view(-1, spec.block_size)
    if not torch.equal(index, index[:, :1].expand_as(index)):
        return None
    scale, zero = grid.scale[:, index[:, 0]], grid.zero[:, index[:, 0]]
    d = float16(scale)
    if not _near(d, scale):
        return None
    if spec.minima:
        return _with_minima(coded, spec, d, zero * scale)
    levels = grid.levels(coded.codes) + spec.middle
    if bool((levels < spec.lowest).any()) or bool((levels >= spec.levels).any()):
        return None
    return Coded(levels.to(torch.uint8), type_of(spec).restored(spec, width, {"d": d}))


def _with_minima(coded: Coded, spec: BlockSpec, d: Tensor, least: Tensor) -> Coded | None:
    """least: what is subtracted from code * scale [out, blocks]."""
    dmin = float16(least)
    if coded.grid.spec.levels > spec.levels or not _near(dmin, least):
        return None
    return Coded(coded.codes, BlockGrid(spec, d, dmin=dmin))


def _near(rounded: Tensor, value: Tensor) -> bool:
    """Whether all values are finite and lose no more than their last bits."""
    return bool((value.isfinite() & ((rounded - value).abs() <= _HALF_STEP * value.abs())).all())
