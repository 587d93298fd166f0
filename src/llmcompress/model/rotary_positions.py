"""Rotary positions as a model's own code computes them: undone, and averaged over positions.

A rotation is linear in its cosines and sines, so that their means turn vectors by the mean rotation, whichever
channels a family pairs.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor

from llmcompress.errors import CheckpointError
from llmcompress.model.choosing_attention import home
from llmcompress.model.streamed_model import StreamedModel


class RotaryPositions:
    """The rotary positions of a model: of queries [batch, heads, length, dim]."""

    def __init__(self, model: StreamedModel) -> None:
        """CheckpointError for a model without rotary positions that are the same in all layers."""
        named = dict(model.causal.named_modules())
        tables = [part for path, part in named.items() if path.rpartition(".")[2] == "rotary_emb"]
        turns = {
            turn
            for layer in model.layers
            for part in layer.modules()
            if (turn := getattr(home(part), "apply_rotary_pos_emb", None)) is not None
        }
        alike = [list(inspect.signature(turn).parameters)[:4] == ["q", "k", "cos", "sin"] for turn in turns]
        asked = [list(inspect.signature(part.forward).parameters) == ["x", "position_ids"] for part in tables]
        if alike != [True] or asked != [True]:
            raise CheckpointError(
                f"this {model.spec.name!r} model has no rotary positions that are the same in all layers",
                "leave out the score that expects queries to come",
            )
        self._table: Any = copy.deepcopy(tables[0])  # some keep what longer texts ask for
        self._turn: Any = next(iter(turns))

    def undone(self, query: Tensor) -> Tensor:
        """Queries at positions 0, 1, ... as they were before rotation."""
        cos, sin = self._at(query, range(query.shape[2]))
        size = cos.square() + sin.square()  # not 1 where a family scales its rotations
        return self._turned(query, cos / size, -sin / size)

    def averaged(self, values: Tensor, positions: range) -> Tensor:
        """Vectors in the last dimension of `values` [batch, heads, any, dim], turned by the mean of rotations."""
        cos, sin = self._at(values, positions)
        return self._turned(values, cos.mean(1, keepdim=True), sin.mean(1, keepdim=True))

    def _at(self, like: Tensor, positions: range) -> tuple[Tensor, Tensor]:
        numbers = torch.tensor(positions, device=like.device)[None]
        cos, sin = self._table(like, numbers)
        return cos, sin

    def _turned(self, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned: Tensor = self._turn(values, values, cos, sin)[0]
        return turned
