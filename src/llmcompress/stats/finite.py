"""Tokens without inf or nan."""

import torch
from torch import Tensor

Count = int | Tensor
"""A count that may still be a tensor on a GPU: reading its value would wait for all work queued before it."""


def only_finite(*rows: Tensor) -> tuple[list[Tensor], Count]:
    """The tokens that are finite in every one of `rows` [tokens, in], and how many are not.

    A token that is not finite is left out; on a GPU it becomes zeros, so that no count has to be waited for.
    """
    if rows[0].is_cuda:
        keep = torch.stack([torch.isfinite(part.sum(dim=1, dtype=torch.float32)) for part in rows]).all(dim=0)
        return [part.where(keep.unsqueeze(1), 0.0) for part in rows], (~keep).sum()
    if all(bool(torch.isfinite(part.sum())) for part in rows):  # one reduction; the exact test only where it fails
        return list(rows), 0
    keep = torch.stack([torch.isfinite(part).all(dim=1) for part in rows]).all(dim=0)
    return [part[keep] for part in rows], int((~keep).sum())
