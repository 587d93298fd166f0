"""GGUF types whose encoding needs no search: floats and types that the gguf package encodes."""

import torch
from torch import Tensor

PLAIN = ("F32", "F16", "BF16", "MXFP4", "TQ1_0", "TQ2_0")
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def plain(values: Tensor, kind: str) -> Tensor:
    """Values float32 [rows, width] in a type of PLAIN: uint8 [rows, bytes]. Too large for F16 becomes infinite."""
    if kind in _FLOATS:
        return values.to(_FLOATS[kind]).contiguous().view(torch.uint8)
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return torch.from_numpy(quantize(values.numpy(), GGMLQuantizationType[kind]))
