"""Fitting whatever grid a spec asks for."""

from typing import Literal

import torch
from torch import Tensor

from llmcompress.grids import codebook, int8, integer, nf4
from llmcompress.grids.base import BlockSpec, CodebookSpec, Int8Spec, Nf4Spec, Spec
from llmcompress.grids.coded import Grid
from llmcompress.grids.encoders import Search, encode


def fitted(
    weight: Tensor,
    spec: Spec,
    *,
    clip: Literal["minmax", "search"],
    search: Search = "best",
    importance: Tensor | None = None,
    scale_dtype: torch.dtype = torch.float16,
    order: Tensor | None = None,
) -> Grid:
    """Scales or tables for weight [out, in] float32; outliers apart, which must have been taken out of it.

    importance [in]: what an error in an input channel costs. search: of block types. order [in]: of channels in groups.
    """
    if isinstance(spec, BlockSpec):
        return encode(weight, spec, search, importance).grid
    if isinstance(spec, Nf4Spec):
        return nf4.fit(weight, spec, clip=clip, importance=importance)
    if isinstance(spec, CodebookSpec):
        return codebook.fit(weight, spec, importance)
    if isinstance(spec, Int8Spec):
        return int8.fit(weight, clip=clip, importance=importance)
    return integer.fit(weight, spec, clip=clip, importance=importance, scale_dtype=scale_dtype, order=order)
