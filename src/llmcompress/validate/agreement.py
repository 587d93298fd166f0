"""Whether a packed model computes what its codes say: its logits beside those of the decoded checkpoint in float32."""

import numpy as np
import torch
from torch import Tensor

from llmcompress.validate.token_statistics import Array

FIGURES = ("logits_error", "logits_error_max")
_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}  # of a number; of a sum
_PER_LAYER = 4.0  # of these that a layer may add; one was measured, in bfloat16 with 30 layers
_CODES = 2.0**-8  # half a step of a code of 8 bits, which a rounding upstream can move an input across


def distance(logits: Tensor, decoded: Tensor) -> Tensor:
    """Relative error [tokens] of logits [tokens, vocabulary]: of their differences, as a constant changes nothing."""
    found = logits - logits.mean(dim=-1, keepdim=True)
    wanted = decoded - decoded.mean(dim=-1, keepdim=True)
    error: Tensor = torch.linalg.vector_norm(found - wanted, dim=-1) / torch.linalg.vector_norm(
        wanted, dim=-1
    ).clamp_min(1e-30)
    return error


def bound(dtype: torch.dtype, layers: int, rounded: bool) -> float:
    """The relative error that rounding alone may cause, as its errors add up at random from layer to layer.

    rounded: whether inputs are rounded to codes. Errors of this size come from arithmetic in `dtype`, whoever does it;
    one wrong scale, zero point or order of codes gives errors near 1.
    """
    unit = max(_ROUNDING[dtype], _CODES if rounded else 0.0)
    return float(_PER_LAYER * unit * layers**0.5)


def figures(errors: Array, dtype: torch.dtype, layers: int, rounded: bool) -> dict[str, float]:
    """Of relative errors of tokens: their root mean square, the largest, and the bound for the first."""
    return {
        "logits_error": _shown(np.sqrt(np.mean(np.square(errors)))),
        "logits_error_max": _shown(errors.max()),
        "logits_bound": _shown(bound(dtype, layers, rounded)),
    }


def _shown(value: float) -> float:
    return float(f"{value:.4g}")
