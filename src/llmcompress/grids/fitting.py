"""Fitting whatever grid a spec asks for."""

import torch
from torch import Tensor

from llmcompress.grids.base import Clip, Search, Spec
from llmcompress.grids.coded import Grid
from llmcompress.grids.grid_type import Fitting, type_of


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
    beside: Grid | None = None,
) -> Grid:
    """Scales or tables for weight [out, in] float32, as `Fitting` says; outliers must have been taken out of it.

    beside: the grid that these rows have as part of a matrix, with whose other rows they share something that stays.
    TypeError for clip output on a grid whose ranges are not searched by the error of outputs.
    """
    grid = type_of(spec)
    if clip == "output" and grid.clips and not grid.output_clip:
        raise TypeError(f"ranges of {spec.name} are not searched by the error of outputs")
    how = Fitting(clip, search, importance, gram, scale_dtype, order)
    return grid.fit(weight, spec, how) if beside is None else grid.fit_beside(weight, beside, how)
