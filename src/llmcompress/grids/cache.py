"""Keys and values as a quantised cache gives them back: [batch, kv heads, length, dim] in and out, in the same type."""

from typing import Literal

import torch
from torch import Tensor

from llmcompress.grids.base import INPUT_SPECS
from llmcompress.grids.inputs import InputGrid

Code = Literal["fp8", "int8", "nvfp4"]

LARGEST = {"fp8": 448.0, "int8": 127.0, "nvfp4": 448.0}
"""What the largest magnitude is scaled to: the end of float8 e4m3, and of the symmetric part of int8.

For NVFP4, as ModelOpt has it, that end too: scales of blocks are then 448/6 at most, far from their own.
"""


def by_token(x: Tensor, bits: int) -> Tensor:
    """Asymmetric integers per token and head, scale and lowest value in float16 (the KV4 of QServe, section 4.2).

    With m the least of the `dim` values and s = (greatest - m) / (2^bits - 1), both rounded to float16, x is stored as
    clamp(round((x - m) / s), 0, 2^bits - 1).
    """
    values = x.to(torch.float32)
    low, high = torch.aminmax(values, dim=-1, keepdim=True)
    last = (1 << bits) - 1
    scale = ((high - low) / last).to(torch.float16).to(torch.float32)
    low = low.to(torch.float16).to(torch.float32)
    codes = ((values - low) / torch.where(scale > 0, scale, 1)).round_().clamp_(0, last)
    return codes.mul_(scale).add_(low).to(x.dtype)


def by_scale(x: Tensor, scale: Tensor, code: Code) -> Tensor:
    """Symmetric codes of x / scale for scales known beforehand, [1] or by head [kv heads, 1, 1]; saturating."""
    scale = scale.to(torch.float32)
    values = x.to(torch.float32) / scale
    if code == "nvfp4":
        blocks = InputGrid(INPUT_SPECS["nvfp4"], torch.ones(1, device=x.device))
        return blocks.rounded(values).mul_(scale).to(x.dtype)
    if code == "fp8":
        end = LARGEST["fp8"]
        codes = values.clamp_(-end, end).to(torch.float8_e4m3fn).to(torch.float32)
    else:
        codes = values.round_().clamp_(-128, 127)
    return codes.mul_(scale).to(x.dtype)


def scale_of(largest: float, code: Code, dtype: torch.dtype) -> Tensor:
    """The scale [1] of a tensor whose largest magnitude is `largest`, rounded up in `dtype` so that nothing saturates.

    1 for a tensor of zeros.
    """
    if largest == 0:
        return torch.ones(1, dtype=dtype)
    exact = torch.tensor([largest / LARGEST[code]], dtype=torch.float64)
    scale = exact.to(dtype)
    return torch.where(
        scale.to(torch.float64) < exact, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale
    )
