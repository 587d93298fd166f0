"""Whether a packed model computes what its codes say: its logits beside those of the decoded checkpoint in float32."""

import numpy as np
import torch
from torch import Tensor

from llmcompress.significant import significant
from llmcompress.validate.token_statistics import Array

FIGURES = ("logits_error", "logits_error_max")
_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}  # relative errors
_PER_LAYER = 4.0  # roundings that a layer may add; 1 was measured in bfloat16 with 30 layers
_CODES = 2.0**-8  # half a step of an 8-bit code: an earlier rounding can move an input to the next code


def logits_errors(logits: Tensor, decoded: Tensor) -> Tensor:
    """Relative error [tokens] of logits [tokens, vocabulary], centred because adding a constant changes nothing."""
    found = logits - logits.mean(dim=-1, keepdim=True)
    wanted = decoded - decoded.mean(dim=-1, keepdim=True)
    error: Tensor = torch.linalg.vector_norm(found - wanted, dim=-1) / torch.linalg.vector_norm(
        wanted, dim=-1
    ).clamp_min(1e-30)
    return error


def rounding_bound(dtype: torch.dtype, layers: int, rounded: bool) -> float:
    """The relative error that rounding alone may cause: independent errors of the layers add up as sqrt(layers).

    rounded: whether inputs are rounded to codes. Any arithmetic in `dtype` has errors of this size; one wrong scale,
    zero point or order of codes gives errors near 1.
    """
    unit = max(_ROUNDING[dtype], _CODES if rounded else 0.0)
    return float(_PER_LAYER * unit * layers**0.5)


def agreement_figures(errors: Array, dtype: torch.dtype, layers: int, rounded: bool) -> dict[str, float]:
    """The root mean square and the largest of the tokens' relative errors, and the bound on the root mean square."""
    return {
        "logits_error": significant(np.sqrt(np.mean(np.square(errors))), 4),
        "logits_error_max": significant(errors.max(), 4),
        "logits_bound": significant(rounding_bound(dtype, layers, rounded), 4),
    }
