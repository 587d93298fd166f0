"""Fitting the scales of a grid, whatever its codes are."""

import torch
from torch import Tensor

from llmcompress.grids import integer
from llmcompress.grids.base import GridSpec
from llmcompress.grids.float8 import FloatGrid, fit_float8
from llmcompress.grids.integer import Clip, IntegerGrid


def fit(
    weight: Tensor,
    spec: GridSpec,
    *,
    clip: Clip = "search",
    importance: Tensor | None = None,
    gram: Tensor | None = None,
    scale_dtype: torch.dtype = torch.float16,
    order: Tensor | None = None,
) -> IntegerGrid | FloatGrid:
    """A grid for weight [out, in] float32; arguments as of `integer.fit`. order is of no use with one scale per row.

    Raises TypeError for clip output where codes are no integers.
    """
    if spec.type == "fp8":
        if clip == "output":
            raise TypeError("ranges of floats are not searched by the error of outputs")
        return fit_float8(weight, spec, clip=clip, importance=importance, scale_dtype=scale_dtype)
    return integer.fit(weight, spec, clip=clip, importance=importance, gram=gram, scale_dtype=scale_dtype, order=order)
