"""How alike two streams of hidden states are, token by token."""

from typing import NamedTuple

import torch
from torch import Tensor


class Cosines(NamedTuple):
    """sum: of the cosines between two states over tokens. tokens: counted."""

    sum: float
    tokens: int

    def plus(self, other: "Cosines") -> "Cosines":
        """Of the tokens of both."""
        return Cosines(self.sum + other.sum, self.tokens + other.tokens)

    @property
    def mean(self) -> float:
        """1 less what ShortGPT calls block influence (arXiv:2403.03853, equation 1)."""
        return self.sum / max(self.tokens, 1)


def cosines(before: Tensor, after: Tensor) -> Cosines:
    """Of states [..., hidden] of any float type with others of the same tokens, in float32."""
    here, there = (states.reshape(-1, states.shape[-1]).to(torch.float32) for states in (before, after))
    values = torch.nn.functional.cosine_similarity(here, there, dim=-1)
    return Cosines(float(values.sum(dtype=torch.float64)), values.numel())
