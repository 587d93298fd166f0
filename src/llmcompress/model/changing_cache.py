"""A key-value cache that changes the keys and values that attention stores and reads."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache

from llmcompress.errors import CheckpointError

Change = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Number of a layer, its keys (after rotation) and values [batch, kv heads, length, dim] -> those that are read."""

_NAMES = ("past_key_values", "past_key_value", "layer_past")  # arguments of transformers' layers that hold the cache


class _Passage:
    """A cache for the call of one layer: changes keys and values, and keeps nothing."""

    def __init__(self, number: int, change: Change) -> None:
        self.number, self.change = number, change
        self.reached = False

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.reached = True
        return self.change(self.number, key, value)

    def __getattr__(self, name: str) -> Any:
        raise CheckpointError(f"layer {self.number} asks more of its cache than to keep keys and values ({name})")


def call_through(
    layer: nn.Module, number: int, change: Change, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, bool]:
    """Call a layer with a cache that changes keys and values; its result, and whether the layer used the cache."""
    signature = inspect.signature(layer.forward)
    bound = signature.bind(*args, **kwargs)
    passage = _Passage(number, change)
    for name in _NAMES:
        if name in signature.parameters:
            bound.arguments[name] = passage
    return layer(*bound.args, **bound.kwargs), passage.reached


class ChangingCache(DynamicCache):  # type: ignore[misc]
    """transformers' own cache for generation, which keeps the keys and values that `change` returns."""

    def __init__(self, config: Any, change: Change) -> None:
        super().__init__(config=config)
        self.change = change

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key, value = self.change(layer_idx, key_states, value_states)
        return super().update(key, value, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]
