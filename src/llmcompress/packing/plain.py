"""GGUF types whose encoding needs no search: floats, and types as the gguf package encodes them."""

import numpy as np
import torch
from torch import Tensor

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def plain(values: Tensor, kind: str) -> Tensor:
    """Values float32 [rows, width] in a type of floats, or another that the package encodes: uint8 [rows, bytes].

    Too large for F16 becomes infinite.
    """
    if kind in _FLOATS:
        return values.to(_FLOATS[kind]).contiguous().view(torch.uint8)
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    with np.errstate(divide="ignore"):  # of blocks that are all zero
        return torch.from_numpy(quantize(values.numpy(), GGMLQuantizationType[kind]))


def plain_values(rows: Tensor, kind: str) -> Tensor:
    """The inverse of `plain`: values float32 [rows, width] of rows [rows, bytes], in memory of their own."""
    if kind in _FLOATS:
        return rows.view(_FLOATS[kind]).to(torch.float32, copy=True)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[kind]))
