"""The largest magnitude of each channel of an input over tokens."""

import torch
from torch import Tensor


class AbsMax:
    """Keeps max |x| of each channel [in]; rows with inf or nan are left out."""

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        self.value = torch.zeros(size, dtype=torch.float32, device=device)

    def update(self, x: Tensor) -> None:
        """Add an input [..., in] of any float type."""
        rows = x.detach().reshape(-1, x.shape[-1]).abs()
        if not rows.numel():
            return
        most = rows.amax(dim=0)
        if not bool(torch.isfinite(most).all()):  # the exact test only where one reduction fails
            rows = rows[torch.isfinite(rows).all(dim=-1)]
            if not rows.numel():
                return
            most = rows.amax(dim=0)
        torch.maximum(self.value, most.to(torch.float32), out=self.value)
