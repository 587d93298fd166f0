"""Tokens without inf or nan."""

import torch
from torch import Tensor

Count = int | Tensor
"""A number that may still lie on a GPU, where asking for it would wait for all work before it."""


def only_finite(*rows: Tensor) -> tuple[list[Tensor], Count]:
    """Tokens [tokens, in] that are finite in all of the tensors, and how many are not: left out, or on a GPU zeroed."""
    if rows[0].is_cuda:
        keep = torch.stack([torch.isfinite(part.sum(dim=1, dtype=torch.float32)) for part in rows]).all(dim=0)
        return [part.where(keep.unsqueeze(1), 0.0) for part in rows], (~keep).sum()
    if all(bool(torch.isfinite(part.sum())) for part in rows):  # one reduction; the exact test only where it fails
        return list(rows), 0
    keep = torch.stack([torch.isfinite(part).all(dim=1) for part in rows]).all(dim=0)
    return [part[keep] for part in rows], int((~keep).sum())
