"""SmoothAttention: keys are divided, and queries multiplied, channel by channel, so that keys are easier to quantise.

Lin et al., QServe (arXiv:2405.04532), section 4.2. Scores are what they were, since q and k meet channel by channel,
and since both channels of a rotated pair are scaled alike the factors may be put into the projections before the
rotation.
"""

from typing import Literal

import torch
from torch import Tensor

Rotary = Literal["half", "interleaved", "none"]

_LEAST = 1e-4  # of a head's largest channel: what is nearly silent is not blown up


def smoothing(
    peaks: Tensor, rotary: Rotary, *, rotated: int | None = None, alpha: float = 0.5, shared: bool = False
) -> Tensor:
    """Factors lambda [kv heads, dim] float64, mean 1 over a head: k / lambda and q * lambda, rows of k_proj and q_proj.

    peaks: largest magnitude of each key channel after rotation, [kv heads, dim] (`stats/key_value_range.py`).
    lambda = peak^alpha. rotary: which channels are a pair: c and c + rotated/2 (half), or 2c and 2c + 1 (interleaved);
    their common peak is the greater one. rotated: how many channels, from the first, are rotated; None: all.
    shared: one factor for all heads, where norms of q and k follow the projections: it then belongs into their weights.
    All query heads of a KV head take its factors.
    """
    heads, dim = peaks.shape
    rotated = dim if rotated is None else rotated
    if rotary != "none" and (rotated % 2 or not 0 < rotated <= dim):
        raise ValueError(f"{rotated} of {dim} channels cannot be rotated in pairs")
    joint = peaks.to(torch.float64)
    if shared:
        joint = joint.amax(dim=0, keepdim=True).expand(heads, dim)
    if rotary != "none":
        joint = torch.cat([_paired(joint[:, :rotated], rotary), joint[:, rotated:]], dim=1)
    top = joint.amax(dim=1, keepdim=True)
    factors = torch.where(top > 0, torch.maximum(joint, _LEAST * top), 1) ** alpha
    return factors / factors.mean(dim=1, keepdim=True)


def _paired(peaks: Tensor, rotary: Rotary) -> Tensor:
    """The greater peak of each pair, at both of its channels."""
    heads, dim = peaks.shape
    shape, axis = ((heads, 2, dim // 2), 1) if rotary == "half" else ((heads, dim // 2, 2), 2)
    pairs = peaks.reshape(shape)
    return pairs.amax(dim=axis, keepdim=True).expand(shape).reshape(heads, dim)
