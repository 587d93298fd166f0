"""What the machine is good at."""

import torch


def quick_type(device: torch.device | str) -> torch.dtype:
    """The type in which a device multiplies matrices fastest of those that have the range of float32."""
    if (
        torch.device(device).type != "cpu"
        or torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
    ):
        return torch.bfloat16
    return torch.float32
