"""GGUF types whose encoding needs no search: floats and types that the gguf package encodes."""

import torch
from torch import Tensor

PLAIN = ("F32", "F16", "BF16", "TQ1_0", "TQ2_0")
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def plain(values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Values float32 [rows, width] in a type of PLAIN: uint8 [rows, bytes], and what these stand for.

    Too large for F16 becomes infinite.
    """
    if kind in _FLOATS:
        found = values.to(_FLOATS[kind]).contiguous()
        return found.view(torch.uint8), found.to(torch.float32)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    packed = quantize(values.numpy(), GGMLQuantizationType[kind])
    return torch.from_numpy(packed), torch.from_numpy(dequantize(packed, GGMLQuantizationType[kind]))
