"""The forward of an EAGLE-3 head (arXiv:2503.01840, section 3): one decoder layer upon hidden states of its target.

A row is a token: its embedding beside a feature of the token before. The feature is made of hidden states of the target
where those are known; beyond, it is the output of the row before. vLLM computes the same (`llama_eagle3`), the feature
being normalised before it is the residual.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from llmcompress.store.draft_head import DraftShape

_LAYER = "layers.0."


class SeenRows(NamedTuple):
    """Keys and values [rows, key-value heads, head_dim] of rows, keys turned by the position."""

    key: Tensor
    value: Tensor


class EagleHead:
    """A head on its weights. weights: by the names in the file, without those of ids; of any one type."""

    def __init__(self, shape: DraftShape, weights: Mapping[str, Tensor]) -> None:
        self.shape, self.weights = shape, weights

    def fused(self, states: Tensor) -> Tensor:
        """The feature [rows, hidden] of the target's hidden states [rows, 3 hidden]."""
        return functional.linear(states, self.weights["fc.weight"])

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits [rows, draft vocabulary] of outputs [rows, hidden]."""
        return functional.linear(self._normed(outputs, "norm"), self.weights["lm_head.weight"])

    def advance(
        self, embedded: Tensor, features: Tensor, first: int, before: SeenRows | None
    ) -> tuple[Tensor, SeenRows]:
        """Outputs [rows, hidden] of further rows, and all keys and values.

        embedded, features [rows, hidden]. first: position of the first row. before: of the rows before them.
        """
        positions = torch.arange(first, first + len(features), device=features.device)
        residual, query, own = self._entering(embedded, features, positions)
        rows = own if before is None else SeenRows(*(torch.cat(pair) for pair in zip(before, own, strict=True)))
        mask = torch.arange(len(rows.key), device=features.device)[None] <= positions[:, None]
        scores = self._scores(query, rows.key).masked_fill(~mask, float("-inf"))
        chances = scores.to(torch.float32).softmax(dim=-1).to(features.dtype)
        return self._leaving(residual, self._mixed(chances, rows.value)), rows

    def unrolled(self, embedded: Tensor, features: Tensor, depths: int) -> list[Tensor]:
        """Outputs [rows, hidden] of rows as they are when so many tokens before were drafted: 0 to depths - 1.

        Row r at depth d sees rows up to r - d with features of the target, then one of each depth up to its own, on
        outputs of the row before at the depth before ("training-time test", section 3.2). Of depth d, the first d rows
        mean nothing. embedded, features [rows, hidden].
        """
        count = len(features)
        positions = torch.arange(count, device=features.device)
        apart = positions[:, None] - positions[None]
        seen: list[SeenRows] = []
        outputs: list[Tensor] = []
        for depth in range(depths):
            residual, query, own = self._entering(embedded, features, positions)
            seen.append(own)
            scores = self._scores(query, seen[0].key).masked_fill(apart < depth, float("-inf"))
            later = [
                SeenRows(*(_shifted(part, depth - number) for part in seen[number])) for number in range(1, depth + 1)
            ]
            own_scores = [self._own_scores(query, rows.key) for rows in later]
            chances = torch.cat([scores, *own_scores], dim=-1).to(torch.float32).softmax(dim=-1).to(features.dtype)
            mixed = self._mixed(chances[..., :count], seen[0].value)
            for number, rows in enumerate(later):
                mixed = mixed + self._own(chances[..., count + number], rows.value)
            outputs.append(self._leaving(residual, mixed))
            features = _shifted(outputs[-1], 1)
        return outputs

    def _normed(self, values: Tensor, name: str) -> Tensor:
        wide = values.to(torch.float32)
        scaled = wide * (wide.square().mean(dim=-1, keepdim=True) + self.shape.eps).rsqrt()
        return scaled.to(values.dtype) * self.weights[f"{name}.weight"]

    def _projected(self, values: Tensor, name: str) -> Tensor:
        return functional.linear(values, self.weights[f"{_LAYER}{name}.weight"])

    def _entering(self, embedded: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, SeenRows]:
        """The residual [rows, hidden], queries [rows, heads, head_dim], keys and values."""
        residual = self._normed(features, f"{_LAYER}hidden_norm")
        both = torch.cat([self._normed(embedded, f"{_LAYER}input_layernorm"), residual], dim=-1)
        query, key, value = (self._projected(both, f"self_attn.{name}_proj") for name in "qkv")
        width = self.shape.head_dim
        query, key, value = (part.reshape(len(part), -1, width) for part in (query, key, value))
        turn = self._turn(positions)
        return residual, _turned(query, turn), SeenRows(_turned(key, turn), value)

    def _leaving(self, residual: Tensor, mixed: Tensor) -> Tensor:
        hidden = residual + self._projected(mixed.flatten(-2), "self_attn.o_proj")
        inner = self._normed(hidden, f"{_LAYER}post_attention_layernorm")
        gate = functional.silu(self._projected(inner, "mlp.gate_proj"))
        return hidden + self._projected(gate * self._projected(inner, "mlp.up_proj"), "mlp.down_proj")

    @property
    def _scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    def _grouped(self, query: Tensor) -> Tensor:
        """[rows, key-value heads, queries of each, head_dim]."""
        return query.reshape(len(query), self.shape.kv_heads, -1, query.shape[-1])

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        """[key-value heads, queries of each, rows, rows of keys]."""
        return torch.einsum("rkgd,skd->kgrs", self._grouped(query), key) * self._scale

    def _own_scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Of each row with the key of its own: [key-value heads, queries of each, rows, 1]."""
        return torch.einsum("rkgd,rkd->kgr", self._grouped(query), key)[..., None] * self._scale

    def _mixed(self, chances: Tensor, value: Tensor) -> Tensor:
        """[rows, heads, head_dim]."""
        return torch.einsum("kgrs,skd->rkgd", chances, value).flatten(1, 2)

    def _own(self, chances: Tensor, value: Tensor) -> Tensor:
        """Of chances [key-value heads, queries of each, rows] of each row's own value: [rows, heads, head_dim]."""
        return torch.einsum("kgr,rkd->rkgd", chances, value).flatten(1, 2)

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [rows, 1, head_dim / 2] of rotary positions (arXiv:2104.09864)."""
        half = self.shape.head_dim // 2
        steps = torch.arange(half, dtype=torch.float32, device=positions.device) / half
        angles = positions.to(torch.float32)[:, None, None] * self.shape.theta**-steps
        return angles.cos(), angles.sin()


def _turned(values: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Halves of the last dimension turned against each other, as llama pairs them."""
    (cos, sin), (first, second) = turn, values.to(torch.float32).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(values.dtype)


def _shifted(rows: Tensor, by: int) -> Tensor:
    """Rows [rows, ...] moved down; zeros come in."""
    return rows if by == 0 else torch.cat([torch.zeros_like(rows[:by]), rows[:-by]])


def drafted_ids(offsets: Tensor) -> Tensor:
    """The target's ids [draft vocabulary] int64, from what is to be added to the draft's."""
    return torch.arange(len(offsets), device=offsets.device) + offsets
