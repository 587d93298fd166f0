"""How alike two streams of hidden states are, token by token."""

from typing import NamedTuple

import torch
from torch import Tensor


class Cosines(NamedTuple):
    """sum: of the cosine between two states, over tokens. tokens: how many there were."""

    sum: float
    tokens: int

    def plus(self, other: "Cosines") -> "Cosines":
        """The cosines of the tokens of both."""
        return Cosines(self.sum + other.sum, self.tokens + other.tokens)

    @property
    def mean(self) -> float:
        """The mean cosine: 1 minus what ShortGPT calls block influence (arXiv:2403.03853, equation 1)."""
        return self.sum / max(self.tokens, 1)


def cosines(before: Tensor, after: Tensor) -> Cosines:
    """The cosines between two hidden states [..., hidden] of the same tokens, of any float type, in float32."""
    here, there = (states.reshape(-1, states.shape[-1]).to(torch.float32) for states in (before, after))
    values = torch.nn.functional.cosine_similarity(here, there, dim=-1)
    return Cosines(float(values.sum(dtype=torch.float64)), values.numel())
