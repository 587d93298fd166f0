"""Experts as separate linears: transformers keeps them as 3-D parameters, which no hook on a linear can see."""

import torch
from torch import Tensor, nn


class Expert(nn.Module):
    """One gated feed-forward expert."""

    def __init__(self, hidden: int, intermediate: int, activation: nn.Module) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] to [tokens, hidden]."""
        out: Tensor = self.down_proj(self.inner(x))
        return out

    def inner(self, x: Tensor) -> Tensor:
        """The input of down_proj: [tokens, intermediate]."""
        gated: Tensor = self.activation(self.gate_proj(x)) * self.up_proj(x)
        return gated


class UnfusedExperts(nn.ModuleList):
    """Stands in for a block of fused experts; same call, same function, summed in order of the experts' numbers."""

    @classmethod
    def like(cls, fused: nn.Module) -> "UnfusedExperts":
        """Experts with the sizes of transformers' fused block: gate_up_proj [experts, 2 inner, hidden]."""
        gate_up: Tensor = fused.gate_up_proj  # type: ignore[assignment]
        count, twice, hidden = gate_up.shape
        return cls(Expert(hidden, twice // 2, fused.act_fn) for _ in range(count))  # type: ignore[arg-type]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, k] to [tokens, hidden]."""
        result = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            tokens, place = torch.where(top_k_index == number)
            if tokens.numel() == 0:
                continue
            out = expert(hidden_states[tokens]) * top_k_weights[tokens, place, None]
            result.index_add_(0, tokens, out.to(result.dtype))
        return result
