"""Fitting whatever grid a spec asks for."""

import torch
from torch import Tensor

from llmcompress.grids import codebook, int8, integer, nf4, progressive
from llmcompress.grids.base import BlockSpec, CodebookSpec, GridSpec, Int8Spec, Nf4Spec, ProgressiveSpec, Spec
from llmcompress.grids.coded import Grid
from llmcompress.grids.encoders import Search, encode
from llmcompress.grids.float8 import fit_float8
from llmcompress.grids.integer import Clip
from llmcompress.workers import SERIAL


def fit(
    weight: Tensor,
    spec: Spec,
    *,
    clip: Clip = "search",
    search: Search = "best",
    importance: Tensor | None = None,
    gram: Tensor | None = None,
    scale_dtype: torch.dtype = torch.float16,
    order: Tensor | None = None,
) -> Grid:
    """Scales or tables for weight [out, in] float32; outliers apart, which must have been taken out of it.

    importance [in]: what an error in an input channel costs. gram [in, in]: the Gram matrix of the inputs, for clip
    output, of which codes other than whole numbers of groups know nothing (TypeError). search: of block types.
    order [in]: of channels in groups.
    """
    if isinstance(spec, BlockSpec):
        return encode(weight, spec, search, SERIAL, importance).grid  # who fits shares rows out
    if isinstance(spec, GridSpec) and spec.type == "int":
        return integer.fit(
            weight, spec, clip=clip, importance=importance, gram=gram, scale_dtype=scale_dtype, order=order
        )
    if clip == "output":
        raise TypeError(f"ranges of {spec.name} are not searched by the error of outputs")
    if isinstance(spec, GridSpec):
        return fit_float8(weight, spec, clip=clip, importance=importance, scale_dtype=scale_dtype)
    if isinstance(spec, Nf4Spec):
        return nf4.fit(weight, spec, clip=clip, importance=importance)
    if isinstance(spec, CodebookSpec):
        return codebook.fit(weight, spec, importance)
    if isinstance(spec, ProgressiveSpec):
        return progressive.fit(weight, spec, clip=clip, importance=importance, order=order)
    assert isinstance(spec, Int8Spec)
    return int8.fit(weight, clip=clip, importance=importance)
