"""What a score is, and what it goes by."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from llmcompress.model.rotary_positions import RotaryPositions


@dataclass(frozen=True)
class Context:
    """What one layer computed for the tokens of a context.

    query [batch, heads, length, dim] and key, value [batch, kv heads, length, dim], after rotation; weights [batch,
    heads, length, length] of attention; scaling: of products of queries and keys; rotation: only for what `rotates`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor
    scaling: float
    rotation: RotaryPositions | None = None

    def by_key_head(self, of_heads: Tensor) -> Tensor:
        """Means [batch, kv heads, ...] over the query heads that read one key head."""
        batch, _, *rest = of_heads.shape
        return of_heads.reshape(batch, self.key.shape[1], -1, *rest).mean(2)


@dataclass(frozen=True)
class Score:
    """A score of keys and values: those of the lowest are evicted.

    of: a context to scores [batch, kv heads, length], infinite for what is always kept. always: how many tokens that
    is. rotates: whether it turns queries to other positions.
    """

    name: str
    of: Callable[[Context], Tensor]
    always: int = 0
    rotates: bool = False
